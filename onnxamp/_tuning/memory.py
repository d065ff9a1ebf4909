"""What was measured, kept on disk: an interrupted tuning goes on where it was, and asks for nothing twice."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import ModelProto

from onnxamp._errors import ArgumentError
from onnxamp._model.storage import write_file
from onnxamp._numerics.measure import Measurement
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.spill import is_large
from onnxamp._tuning.local import Tally

_FORMAT: Final = 2


@dataclass(slots=True)
class Memory:
    """Measurements of one tuning: ``signature`` names model, samples and settings; ``path`` is None where nothing is
    kept.
    """

    signature: str
    path: Path | None = None
    tally: Tally = field(default_factory=Tally)
    errors: dict[str, float] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    """Keys of errors that were there at the beginning."""
    recalled: set[str] = field(default_factory=set)
    """Those of them, of mask runs, that were asked for."""

    def error(self, low: Iterable[str], how: Sequence[int] | str, ask: Callable[[], float]) -> float:
        """An error that was measured before, or is measured now; ``how`` is samples of mask runs, or a name."""
        key = digest([*sorted(low), "", *map(str, how)])
        if key not in self.errors:
            self.errors[key] = ask()
            self.save()
        if key in self.known and not isinstance(how, str):
            self.recalled.add(key)
        return self.errors[key]

    def save(self) -> None:
        """Write everything down.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is not None:
            facts: dict[str, Any] = {
                "onnxamp": "tune",
                "format": _FORMAT,
                "signature": self.signature,
                "samples": self.tally.samples,
                "worst": _written(self.tally.worst),
                "values": {name: list(map(_written, astuple(row))) for name, row in self.tally.values.items()},
                "errors": {key: _written(error) for key, error in self.errors.items()},
            }
            write_file(self.path, (json.dumps(facts) + "\n").encode())


def recall(signature: str, path: Path | None) -> Memory:
    """The memory in a file, if it is of the same tuning; else an empty one.

    Raises:
        ArgumentError: the file is there, but is no such memory.
    """
    if path is None or not path.exists():
        return Memory(signature, path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = data["onnxamp"], data["format"]
        rows = {name: Measurement(*map(_read, row)) for name, row in data["values"].items()}
        tally = Tally(int(data["samples"]), rows, _read(data["worst"]))
        errors = {key: _read(error) for key, error in data["errors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{str(path)!r} holds no state of a tuning ({error}): name another file.") from None
    if kind != ("tune", _FORMAT):
        raise ArgumentError(f"{str(path)!r} holds no state of a tuning that this onnxamp reads: name another file.")
    if data.get("signature") != signature:
        return Memory(signature, path)
    return Memory(signature, path, tally, errors, frozenset(errors))


def _written(number: float) -> float | str:
    return "inf" if number == inf else number


def _read(number: Any) -> Any:
    return float(number) if isinstance(number, str) else number


def fingerprint(words: Iterable[str], model: ModelProto, samples: Samples) -> str:
    """What measurements belong to: settings, a model with all its weights, and samples."""
    found = sha256("\n".join(words).encode())
    for piece in (model.SerializeToString(deterministic=True) if not is_large(model) else b"", *_contents(samples)):
        found.update(piece)
    for tensor in model.graph.initializer if is_large(model) else ():
        found.update(tensor.name.encode() + tensor.raw_data)
    return found.hexdigest()[:24]


def _contents(samples: Samples) -> Iterator[bytes]:
    for sample in samples:
        for name, feed in sample.items():
            yield name.encode()
            for array in feed if isinstance(feed, list) else [feed]:
                yield array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode()


def digest(parts: Iterable[str]) -> str:
    """A short name for texts in order."""
    return sha256("\n".join(parts).encode()).hexdigest()[:24]
