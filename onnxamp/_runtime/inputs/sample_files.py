"""Samples in files: arrays from untrusted ``.npz`` archives and JSON as written by Polygraphy or by hand, and samples
of an iterator, stored for another pass.

Nothing is unpickled, and no header can cause an allocation by itself: sizes are checked against the bytes that exist.
"""

import base64
import json
import lzma
import math
import pickle
import re
import shutil
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from onnxamp._base.errors import ArgumentError, MissingFileError, OutputError
from onnxamp._base.paths import cannot_read, near_file, reason_of
from onnxamp._base.signals import when_gone
from onnxamp._base.temporary import temporary_path
from onnxamp._runtime.sessions.values import Fractions, WholeNumbers

if TYPE_CHECKING:
    from onnxamp._runtime.sessions.values import Feed, Feeds

Array: TypeAlias = npt.NDArray[Any]
Span: TypeAlias = tuple[int, int]
"""Offsets of the first byte and of the byte after the last."""

_ARCHIVE_START: Final = (b"PK\x03\x04", b"PK\x05\x06")
"""First bytes of an archive; the second is an empty one."""

_SUFFIXES: Final = frozenset({".npz", ".json"})
"""Of files that hold samples."""

_READ_FAILURES: Final = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    MemoryError,
    OverflowError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    lzma.LZMAError,
    tokenize.TokenError,
)
"""Exceptions of NumPy, zipfile and json about broken files; an encrypted member is a RuntimeError, and a header of an
array that is no Python a TokenError."""

_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    # The same layout; it says how names of fields are written.
    (3, 0): np.lib.format.read_array_header_2_0,
}

# Zeros compress by more than this factor, so that small archives may expand by any.
_MAX_RATIO: Final = 100
_MAX_RATIO_FROM: Final = 2**30
"""Archives that expand by more than this factor, to more than this many bytes, are refused."""
ROOM: Final = 64 << 20
"""Bytes of samples that are kept in memory."""


class FileSample(dict[str, Any]):
    """The arrays of a sample, by name, and the file that they were read from."""

    __slots__ = ("origin",)

    def __init__(self, arrays: Mapping[str, Any], origin: str = "") -> None:
        super().__init__(arrays)
        self.origin = origin


def quoted(path: Path) -> str:
    """Return a path for messages, as seen from the working folder: names with control characters are quoted."""
    # It may lie elsewhere, and the working folder may be gone.
    with suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    text = str(path)
    return text if text.isprintable() else repr(text)


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an ``.npz`` file, by name.

    Raises:
        ArgumentError: it is not an ``.npz`` file of plain arrays, is damaged, or is smaller than its headers say.
    """
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            _check_growth(path, sum(member.file_size for member in members))
            arrays = dict[str, Array]()
            for member in members:
                name = member.filename.removesuffix(".npy")
                _check_name(path, name, arrays)
                with _array_failures(path, name):
                    arrays[name] = _read_member(archive, member)
            return FileSample(arrays, quoted(path))
    except ArgumentError:  # a ValueError too
        raise
    except _READ_FAILURES as error:
        raise cannot_read(
            quoted(path), error, "Is it a complete .npz file?"
        ) from error


def _check_name(path: Path, name: str, arrays: Mapping[str, Array]) -> None:
    if name in arrays:
        raise ArgumentError(
            f"{quoted(path)} holds two arrays named {name!r}: save it again."
        )


def _check_growth(path: Path, claimed: int) -> None:
    if claimed > max(_MAX_RATIO_FROM, _MAX_RATIO * path.stat().st_size):
        raise ArgumentError(
            f"{quoted(path)} would grow from {path.stat().st_size} to {claimed} bytes, which only a hostile file should"
            " do. If it is meant, save it with numpy.savez, which does not compress."
        )


@contextmanager
def _array_failures(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except _READ_FAILURES as error:
        raise ArgumentError(
            f"Cannot read the array {name!r} of {quoted(path)}: {reason_of(error)}. Save it again as a plain array."
        ) from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with archive.open(member) as stream:
        return _read_npy(stream, member.file_size)  # type: ignore[arg-type] # reads like a file


def _read_npy(stream: BinaryIO, size: int) -> Array:
    """Return the array of an ``.npy`` stream of ``size`` bytes that can seek.

    Raises:
        ValueError: it holds no plain array, or fewer bytes than its header says.
    """
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"its format version {version} is unknown")
    shape, _, dtype = _HEADERS[version](stream)
    if not all(type(size) is int for size in shape):
        raise ValueError(f"its shape {shape} is not made of whole numbers")
    if dtype.hasobject or dtype.names is not None:
        raise ValueError("it holds Python objects or records, which are not read")
    claimed = math.prod(shape) * dtype.itemsize
    held = size - stream.tell()
    if min(shape, default=0) < 0 or claimed > held:
        raise ValueError(
            f"its shape {list(shape)} needs {claimed} bytes, but it holds {held}"
        )
    stream.seek(0)
    return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def json_samples(path: Path) -> list[Span]:
    """Return the offsets of the samples in a JSON file: of the objects in its list, or of its one object.

    Complexity: linear in the size of the file, which is read at once; one sample is parsed at a time.

    Raises:
        ArgumentError: it is neither, or is no JSON.
    """
    with _json_failures(path):
        text = path.read_bytes().decode("latin-1")  # one character for each byte
        spans = list[Span]()
        decoder = json.JSONDecoder()
        position = _after_gap(text, len(_MARK) if text.startswith(_MARK) else 0)
        in_list = text.startswith("[", position)
        while not spans or (in_list and text.startswith(",", position)):
            start = _after_gap(text, position + in_list)  # skips the bracket or comma
            if not text.startswith("{", start):
                raise ValueError("it is neither an object nor a list of objects")
            _, end = decoder.raw_decode(text, start)
            spans.append((start, end))
            position = _after_gap(text, end)
        if text[position:].strip() != "]" * in_list:
            raise ValueError("it is not a single list of objects")
    return spans


_MARK: Final = "\u00ef\u00bb\u00bf"
"""The byte order mark of UTF-8, which some editors write first."""
_GAP: Final = re.compile(r"[ \t\n\r]*")


def _after_gap(text: str, position: int) -> int:
    """Return the position of the first character that is not white space."""
    gap = _GAP.match(text, position)
    return position if gap is None else gap.end()


@contextmanager
def _json_failures(path: Path) -> Iterator[None]:
    try:
        yield
    except _READ_FAILURES as error:
        raise ArgumentError(
            f"Cannot read {quoted(path)}: {reason_of(error)}. Inputs are .npz files, or JSON: a list of objects, one per"
            " sample, of arrays by name, which are nested lists of numbers, or as Polygraphy saves them (--save-inputs)."
        ) from error


def read_json(path: Path, span: Span, number: int = 0) -> dict[str, Array]:
    """Return one sample of a JSON file, by name; ``number`` counts them from 1.

    Whole numbers become int64, other numbers float32 (float64 where that would overflow), truth values bool. Models
    that take doubles get all digits of the text.

    Raises:
        ArgumentError: it is not a sample, or one of its arrays cannot be read.
    """
    with _json_failures(path):
        with path.open("rb") as stream:
            stream.seek(span[0])
            text = stream.read(span[1] - span[0]).decode()
        sample = json.loads(text, object_pairs_hook=_without_duplicates)
        if (kind := _class(sample)) is not None:
            raise ValueError(f"it holds a {kind!r} of Polygraphy, not inputs")
    arrays = {}
    for name, content in sample.items():
        with _array_failures(path, name):
            read = _encoded if isinstance(content, dict) else _listed
            arrays[name] = read(content)
    return FileSample(
        arrays, f"{quoted(path)}{f', sample {number}' if number else ''}"
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = Counter(name for name, _ in pairs)
    for name, count in counts.most_common(1):
        if count > 1:
            raise ValueError(f"{name!r} appears twice")
    return dict(pairs)


_CLASS: Final = "polygraphy_class"
_OLD_CLASS: Final = "__polygraphy_encoded_"
"""Polygraphy's mark of an object's type: this key, formerly a key with this prefix."""


def _class(content: Mapping[str, Any]) -> str | None:
    old = (key for key in content if key.startswith(_OLD_CLASS))
    marked = content.get(_CLASS, next(old, "").removeprefix(_OLD_CLASS) or None)
    return marked if isinstance(marked, str) else None


def _encoded(content: Mapping[str, Any]) -> Array:
    """Return an array as Polygraphy encodes it: an ``.npy`` file in base64."""
    kind = _class(content)
    text = content.get("array")
    if kind == "Tensor":
        raise ValueError(
            "it is a pickled tensor of PyTorch, which is not read: give Polygraphy NumPy arrays"
        )
    if kind != "ndarray" or not isinstance(text, str):
        raise ValueError(
            "it is neither nested lists of numbers nor an array of Polygraphy"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        # The first versions wrote bytes as they are, and archives of one array.
        data = text.encode("latin-1")
    if not data.startswith(_ARCHIVE_START):
        return _read_npy(BytesIO(data), len(data))
    with zipfile.ZipFile(BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) != 1 or members[0].file_size > max(
            _MAX_RATIO_FROM, _MAX_RATIO * len(data)
        ):
            raise ValueError("it is an archive, but not of one plain array")
        return _read_member(archive, members[0])


def _listed(content: Any) -> Array:
    """Return nested lists as an array, with float32 for fractions, which most models take, and their doubles.

    Numbers that only float64 holds stay float64.
    """
    array = np.asarray(content)
    if not array.size:
        return array.astype(np.float32).view(WholeNumbers)
    if array.dtype.kind not in "biufU":
        raise ValueError(
            "it is not nested lists of numbers, equally long on each level"
        )
    if array.dtype.kind != "f":
        return array.view(WholeNumbers) if array.dtype.kind in "iu" else array
    with np.errstate(over="ignore"):
        single = array.astype(np.float32).view(Fractions)
    single.doubles = array
    return single if np.array_equal(np.isinf(single), np.isinf(array)) else array


def folder_readers(path: Path) -> list[partial[Mapping[str, Any]]]:
    """Return a reader of each sample in a folder, in natural order of the names of files."""
    files = [
        file
        for file in path.iterdir()
        if file.suffix.lower() in _SUFFIXES
        and file.is_file()
        and not file.name.startswith(".")  # macOS leaves some beside copied files
    ]
    if not files:
        raise ArgumentError(
            f"The folder {quoted(path)} holds no .npz or .json file: save one per sample there."
        )
    return [partial(read_one, file) for file in sorted(files, key=_natural)]


def _natural(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts numbers in names by size, and equal ones by how they are written."""
    parts = re.split("([0-9]+)", path.name)
    key = [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
    return key, path.name


def read_one(path: Path) -> Mapping[str, Any]:
    """Return the sample of a file that holds one."""
    readers = file_readers(path)
    if len(readers) != 1:
        raise ArgumentError(
            f"{quoted(path)} holds {len(readers)} samples, but files of a folder hold one each: name the file itself."
        )
    return readers[0]()


def file_readers(path: Path) -> Sequence[partial[dict[str, Array]]]:
    """Return a reader of each sample in a file."""
    if not path.exists():
        raise MissingFileError(
            f"Cannot read inputs from {quoted(path)}: there is no such file.{near_file(path)}"
        )
    if not path.is_file():
        raise ArgumentError(
            f"Cannot read inputs from {quoted(path)}: it is neither a file nor a folder."
        )
    with path.open("rb") as stream:
        start = stream.read(8)
    if start.startswith(np.lib.format.MAGIC_PREFIX):
        text = f"{quoted(path)} holds one array without a name: save inputs with numpy.savez(path, name=array)."
        raise ArgumentError(text)
    if start.startswith(_ARCHIVE_START) or path.suffix.lower() == ".npz":
        return [partial(read_npz, path)]
    spans = json_samples(path)
    return [
        partial(read_json, path, span, number if len(spans) > 1 else 0)
        for number, span in enumerate(spans, 1)
    ]


class Spool(Sequence[Callable[[], "Feeds"]]):
    """The readers of the samples of an iterator. Asking for a sample consumes those before it; asking for
    their number consumes all.

    Args:
        source: yields the samples, once.
        origin: where they come from.
        expected: their expected number; 0 if unknown.
        room: bytes to keep in memory.
    """

    def __init__(
        self,
        source: "Iterator[Feeds]",
        origin: str,
        expected: int = 0,
        room: int = ROOM,
    ) -> None:
        self.origin = origin
        self.expected = expected
        self._source: Iterator[Feeds] | None = source
        self._room = room
        self._readers: list[Callable[[], Feeds]] = []
        self._first = 1
        """The first sample that is not forgotten, apart from sample 0."""
        self._folder: Path | None = None

    @property
    def is_ended(self) -> bool:
        """Whether all samples were read, so that their number is known."""
        return self._source is None

    @property
    def taken(self) -> int:
        """Their number."""
        return len(self._readers)

    def has(self, number: int) -> bool:
        """Return whether there is a sample of that number.

        Raises:
            OutputError: the temporary folder is full. Others as the iterator.
        """
        while self._source is not None and len(self._readers) <= number:
            sample = next(self._source, None)
            if sample is None:
                self._source = None
            else:
                self._readers.append(self._kept(sample))
        return number < len(self._readers)

    @overload
    def __getitem__(self, index: int) -> "Callable[[], Feeds]": ...
    @overload
    def __getitem__(self, index: slice) -> "Sequence[Callable[[], Feeds]]": ...
    def __getitem__(
        self, index: int | slice
    ) -> "Callable[[], Feeds] | Sequence[Callable[[], Feeds]]":
        if isinstance(index, slice) or index < 0:
            len(self)
        else:
            self.has(index)
        return self._readers[index]

    def __len__(self) -> int:
        while self.has(len(self._readers)):
            pass
        return len(self._readers)

    def forget(self, number: int) -> None:
        """Forget the samples before a number, except the first one; they cannot be read again."""
        for at in range(self._first, min(number, len(self._readers))):
            reader = self._readers[at]
            self._readers[at] = _forgotten
            if isinstance(reader, partial) and reader.func is read_spooled:
                reader.args[0].unlink(missing_ok=True)
            else:
                self._room += _size(reader())
        self._first = max(self._first, min(number, len(self._readers)))

    def _kept(self, sample: "Feeds") -> "Callable[[], Feeds]":
        """Return a reader of a sample; arrays are copied, because the iterator may reuse their memory."""
        size = _size(sample)
        if size <= self._room:
            self._room -= size
            return partial(
                dict, {name: _copied(feed) for name, feed in sample.items()}
            )
        if self._folder is None:
            self._folder = temporary_path()
            when_gone(self, partial(shutil.rmtree, self._folder, ignore_errors=True))
            self._folder.mkdir(mode=0o700)
        path = self._folder / f"{len(self._readers)}.sample"
        try:
            with path.open("wb") as stream:
                pickle.dump(dict(sample), stream, protocol=5)
        except OSError as error:
            raise OutputError(
                f"Samples of a {self.origin} do not fit into {str(self._folder)!r}: {error.strerror or error}. Take"
                " fewer (itertools.islice), or set TMPDIR to a folder with more room."
            ) from error
        return partial(read_spooled, path)


def read_spooled(path: Path) -> "Feeds":
    """Return a sample of a spool of any process of this machine."""
    with path.open("rb") as stream:
        sample: Feeds = pickle.load(stream)  # noqa: S301 - the file is our own
    return sample


def _forgotten() -> "Feeds":
    raise AssertionError("A sample was forgotten, but is needed.")


def _size(sample: "Feeds") -> int:
    size = 0
    for feed in sample.values():
        parts = feed if isinstance(feed, list) else [feed]
        size += sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
    return size


def _copied(feed: "Feed") -> "Feed":
    if isinstance(feed, list):
        return [_copied(part) for part in feed]
    return feed.copy() if isinstance(feed, np.ndarray) else feed
