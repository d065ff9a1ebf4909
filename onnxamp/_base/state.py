"""State files: a job saves each result as soon as it has it, and an interrupted job resumes with the remaining work.

A state file contains one JSON object per line. The first line identifies the file. Every other line belongs to a
*part*, the results of one kind of work, and records what the part depends on, or one result. Lines are appended and
never changed, so a process that is killed leaves at most one incomplete line, which the next run cuts off. Each line
ends with a checksum, so that lines changed later are not mistaken for measurements. Values stay in the file until they
are requested.

A part belongs to the work that began it. If anything that it depends on has changed since, that is an error, and the
message names the change.
"""

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from io import BytesIO
from os import PathLike
from pathlib import Path
from time import monotonic
from types import UnionType
from typing import (
    Any,
    BinaryIO,
    Final,
    Literal,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)
from zlib import crc32

from onnxamp._base.errors import ArgumentError, OutputError
from onnxamp._base.paths import as_path, is_remote, lock, reason_of
from onnxamp._base.signals import cleaned_up
from onnxamp._base.words import enumerated

_HEAD: Final = b'{"onnxamp": "state", "format": 2}\n'
_SUM: Final = b', "sum": "%08x"}\n'
"""The end of a line: the CRC-32 of the preceding text."""
_SAVE_EVERY: Final = 5.0
"""Seconds between two uploads of a state at a URL, which cannot be appended to: the most that a killed job loses."""

Facts: TypeAlias = Mapping[str, str]
"""The dependencies of a part: "the model" -> its fingerprint, ..."""
_Place: TypeAlias = tuple[int, int]
"""The offset and the length of a line."""


def fingerprint(*parts: str | bytes | memoryview) -> str:
    """Return a short hash of the parts in order."""
    from hashlib import sha256  # noqa: PLC0415 - few runs need it

    digest = sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # Lengths tell "ab", "c" from "a", "bc".
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.hexdigest()[:24]


def file_print(path: Path) -> str:
    """Return the fingerprint of the name, the size and the time of a file.

    Raises:
        OSError: there is none.
    """
    status = path.stat()
    return fingerprint(f"{path.name} {status.st_size} {status.st_mtime_ns}")


@dataclass(slots=True, eq=False)
class Part(Mapping[str, Any]):
    """The results of one kind of work: JSON values by key."""

    name: str
    facts: Facts
    _state: "State"
    _places: dict[str, _Place] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, key: str) -> Any:
        return self._state._read(self._places[key])["is"]

    def __setitem__(self, key: str, value: Any) -> None:
        """Store a value.

        Raises:
            OutputError: the file cannot be written.
        """
        self._places[key] = self._state._add(
            {"of": self.name, "key": key, "is": value}
        )


@dataclass(slots=True)
class State:
    """An open state file; :func:`opened` opens it."""

    path: Path
    _file: BinaryIO
    _refused: OSError | None = None
    """The reason why nothing can be written, if so. A finished job needs to write nothing more."""
    _parts: dict[str, Part] = field(default_factory=dict)
    _end: int = 0
    _saved: float = field(default_factory=monotonic)

    def part(self, name: str, facts: Facts, *, renew: bool = False) -> Part:
        """Return the part of this name, or an empty one if there is none.

        Args:
            name: identifies the part, also to people.
            facts: what the part depends on.
            renew: start over if these have changed.

        Raises:
            ArgumentError: the facts have changed. OutputError: the file cannot be written.
        """
        known = self._parts.get(name)
        if known is not None and not renew:
            self.check(name, {**dict.fromkeys(known.facts, ""), **facts})
        if known is None or known.facts != facts:
            self._add({"part": name, "facts": dict(facts)})
            self._parts[name] = known = Part(name, dict(facts), self)
        return known

    def check(self, name: str, facts: Facts) -> None:
        """Check the facts that the part of this name depends on, before any work is done for it.

        Raises:
            ArgumentError: any of these facts has changed.
        """
        known = self._parts.get(name)
        if known is None:
            return
        changed = [what for what in facts if facts[what] != known.facts.get(what, "")]
        if changed:
            raise ArgumentError(
                f"The state file {str(self.path)!r} belongs to another {name}: {enumerated(changed)} changed since"
                " then. Delete it to start again, or name another file."
            )

    def drop(self, name: str) -> None:
        """Forget a part, because its work is finished."""
        if self._parts.pop(name, None) is not None:
            self._add({"part": name, "facts": None})

    def check_writable(self) -> None:
        """Check that results can be saved.

        Raises:
            OutputError: the file can only be read.
        """
        if self._refused is not None:
            with _writing(self.path):
                raise self._refused

    def _read(self, place: _Place) -> Any:
        self._file.seek(place[0])
        return json.loads(self._file.read(place[1]))

    def _add(self, line: Any) -> _Place:
        data = _summed(json.dumps(line).encode())
        with _writing(self.path):
            self.check_writable()
            self._file.seek(self._end)
            self._file.write(data)
            self._file.flush()
        place = (self._end, len(data))
        self._end = self._end + len(data)
        if monotonic() - self._saved > _SAVE_EVERY:
            self._upload()
        return place

    def _upload(self) -> None:
        """Upload the state if it is at a URL; local files are written immediately."""
        if isinstance(self._file, BytesIO):
            with _writing(self.path):
                self.path.write_bytes(self._file.getvalue())
            self._saved = monotonic()

    def _load(self) -> None:
        """Find all lines, and cut off an incomplete one that a killed process left.

        Raises:
            ValueError: the file is not a state, or a line other than the last is damaged.
        """
        self._file.seek(0)
        head = self._file.readline()
        if head != _HEAD and not _HEAD.startswith(head):
            raise ValueError("its first line is not that of a state file")
        self._end = len(head) if head == _HEAD else 0
        for number, data in enumerate(self._file if self._end else (), 2):
            if not _is_whole(data):
                # A killed process leaves one incomplete line at the end; anything else is damage.
                if any(map(_is_whole, self._file)):
                    raise ValueError(f"line {number} is damaged")
                break
            try:
                self._know(json.loads(data), (self._end, len(data)))
            except (KeyError, TypeError):
                raise ValueError(f"line {number} belongs to another state") from None
            self._end += len(data)
        if self._refused is None and self._file.seek(0, os.SEEK_END) > self._end:
            self._file.truncate(self._end)
        if not self._end:
            self.check_writable()
            self._file.seek(0)
            self._file.write(_HEAD)
            self._file.flush()
            self._end = len(_HEAD)

    def _know(self, line: Any, place: _Place) -> None:
        """Note what a line says: a part begins or ends, or has a result."""
        if "part" in line:
            name = line["part"]
            self._parts.pop(name, None)
            if line["facts"] is not None:
                self._parts[name] = Part(name, dict(line["facts"]), self)
        else:
            self._parts[line["of"]]._places[line["key"]] = place


def _summed(line: bytes) -> bytes:
    """Return a line with its checksum in place of the brace that ends its object."""
    return line[:-1] + _SUM % crc32(line)


def _is_whole(data: bytes) -> bool:
    """Return whether a line is intact."""
    return data == _summed(data[: -len(_SUM % 0)] + b"}")


StateLike: TypeAlias = State | str | PathLike[str] | None
"""The forms of a state that functions accept: a path, None to save nothing, or an open state."""


@contextmanager
def opened(
    given: StateLike, *, renew: bool = False, waits: bool = True
) -> Iterator[State | None]:
    """Open the state in a file, which is created if it is missing. No other process can open it in the meantime.

    Args:
        given: the file. A file at a URL is uploaded every few seconds and at the end, and is not locked. An open state
            stays open; None yields None.
        renew: replace a file that is not a state, unless it has another name as well, and wait while another process
            has it open, such as one left by a killed run.
        waits: whether to wait in that case. A script that its own workers run again would wait for itself.

    Raises:
        ArgumentError: the file is not a state, or another process has it open. OutputError: it cannot be written.
    """
    if given is None or isinstance(given, State):
        yield given
        return
    path = as_path(given)
    with _writing(path):
        file, refused = _opened(path)
    try:
        state = State(path, file, refused)
        _lock(path, file, wait=renew and waits)
        _load(state, renew=renew)
        with cleaned_up(state._upload):
            yield state
    except BaseException:
        with suppress(OSError):  # the problem is already known
            file.close()
        raise
    with _writing(path):  # closing retries what could not be written before
        file.close()


def _opened(path: Path) -> tuple[BinaryIO, OSError | None]:
    """Open a state file, and return it with the error that makes it read-only, if any."""
    if is_remote(path):
        return BytesIO(path.read_bytes() if path.exists() else b""), None
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b"), None
    except OSError as error:
        is_read_only = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        if not is_read_only or not path.is_file():
            raise
        return path.open("rb"), error


def _load(state: State, *, renew: bool) -> None:
    with _writing(state.path):
        try:
            state._load()
        except ValueError as error:
            # A file with another name as well belongs to a user: it is no damaged state.
            renews = renew and not _is_linked(state.path)
            if not renews or state._refused is not None:
                raise ArgumentError(
                    f"{str(state.path)!r} is not a state that this version of onnxamp reads ({error}): delete it"
                    " to start again, or name another file."
                ) from None
            state._file.truncate(0)
            state._load()


def _is_linked(path: Path) -> bool:
    """Return whether a file has another name as well."""
    return not is_remote(path) and (path.is_symlink() or path.stat().st_nlink > 1)


def _lock(path: Path, file: BinaryIO, *, wait: bool) -> None:
    if isinstance(file, BytesIO):
        return
    try:
        lock(file.fileno(), wait=wait)
    except BlockingIOError:
        raise ArgumentError(
            f"Another process is using the state file {str(path)!r}: wait for it to end, or name another file."
        ) from None
    except OSError:  # this file system does not support locks
        return


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report errors of the operating system as errors about the state file."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"Cannot write the state file {str(path)!r}: {reason_of(error)}."
        ) from None


def as_data(item: Any, *, named: bool = True) -> Any:
    """Return dataclasses, mappings and tuples as JSON types, and infinities and NaN as strings.

    ``named``: whether a dataclass becomes an object; otherwise, it becomes the list of its fields.
    """
    if is_dataclass(item) and not isinstance(item, type):
        values = {
            field.name: as_data(getattr(item, field.name), named=named)
            for field in fields(item)
        }
        return values if named else list(values.values())
    if isinstance(item, Mapping):
        data = {}
        for key, value in item.items():
            text = " ".join(key) if isinstance(key, tuple) else str(key)
            data[text] = as_data(value, named=named)
        return data
    if isinstance(item, (list, tuple, set, frozenset)):
        return [as_data(value, named=named) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return str(item) if isinstance(item, Path) else item


def from_data(kind: Any, data: Any) -> Any:
    """Invert :func:`as_data` for a dataclass of dataclasses, mappings, tuples, sets, strings and numbers.

    Raises:
        TypeError, KeyError, ValueError: the data are not such a record.
    """
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if data is None and type(None) in options:
        return None
    # If both a string and a number are possible, a string stays one: worst elements may be either.
    kind = str if isinstance(data, str) and str in options else options[0]
    if get_origin(kind) is Literal:
        if data not in get_args(kind):
            raise ValueError(data)
        return data
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        if isinstance(data, list):
            data = dict(zip(hints, data, strict=True))
        values = {name: from_data(hint, data[name]) for name, hint in hints.items()}
        return kind(**values)
    if get_origin(kind) is not None:
        return _collection(kind, data)
    if kind is float and isinstance(data, (str, int, float)):
        number = float(data)  # fails for a text that is no number
        # An integer stays an integer, so that it is written as one again.
        return number if isinstance(data, str) else data
    if kind is not Any and not isinstance(data, kind):
        raise TypeError(kind)
    return data


def _collection(kind: Any, data: Any) -> Any:
    """Return data as a tuple, a set or a mapping."""
    inside = get_args(kind)
    if get_origin(kind) is frozenset:
        return frozenset(from_data(inside[0], item) for item in data)
    if get_origin(kind) is tuple:
        kinds = inside[:1] * len(data) if inside[-1] is Ellipsis else inside
        pairs = zip(kinds, data, strict=True)
        return tuple(from_data(one, item) for one, item in pairs)
    return {name: from_data(inside[1], item) for name, item in data.items()}


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    """Return the fields of a dataclass, with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
