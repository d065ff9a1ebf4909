"""Measurements of a tuning in a file, so that an interrupted one resumes and nothing is measured twice."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._model.storage import write_file
from onnxamp._model.weights import blocks_of, read_array
from onnxamp._numerics.measure import Measurement
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.spill import is_large
from onnxamp._tuning.sensitivity import LocalErrors, LocalSample

_FORMAT: Final = 2


@dataclass(slots=True)
class TuningState:
    """Measurements of one tuning.

    ``signature`` identifies model, samples and settings; ``path`` is None if nothing is saved.
    """

    signature: str
    path: Path | None = None
    local: LocalErrors = field(default_factory=LocalErrors)
    errors: dict[str, float] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    """Keys of the errors that were loaded."""
    recalled: set[str] = field(default_factory=set)
    """The loaded errors of mask runs that were needed again."""

    def error(self, low: Iterable[str], how: Sequence[int] | str, measure: Callable[[], float]) -> float:
        """The known error of a choice, or a new measurement; ``how`` is the samples of a mask run, or a name."""
        return next(self.errors_of([frozenset(low)], how, lambda _: iter([measure()])))

    def errors_of(
        self,
        choices: Sequence[AbstractSet[str]],
        how: Sequence[int] | str,
        measure: Callable[[Sequence[AbstractSet[str]]], Iterator[float]],
    ) -> Iterator[float]:
        """:meth:`error` of several choices, as they are measured; ``measure`` gets those that are not known."""
        keys = [_digest([*sorted(low), "", *map(str, how)]) for low in choices]
        missing = {key: low for key, low in zip(keys, choices, strict=True) if key not in self.errors}
        found = measure(list(missing.values())) if missing else iter(())
        for key in keys:
            if key not in self.errors:
                self.errors[key] = next(found)
                self.save()
            if key in self.known and not isinstance(how, str):
                self.recalled.add(key)
            yield self.errors[key]

    def save(self) -> None:
        """Write everything to the file.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is not None:
            facts: dict[str, Any] = {
                "onnxamp": "tune",
                "format": _FORMAT,
                "signature": self.signature,
                "samples": self.local.samples,
                "worst": _written(self.local.worst),
                "values": _rows(self.local.values),
                "ahead": {
                    str(n): [_written(row.error), _rows(row.values)] for n, row in self.local.done_ahead().items()
                },
                "errors": {key: _written(error) for key, error in self.errors.items()},
            }
            write_file(self.path, (json.dumps(facts) + "\n").encode())


def load_state(signature: str, path: Path | None) -> TuningState:
    """The state in a file if it belongs to the same tuning, else an empty one.

    Raises:
        ArgumentError: the file exists, but is no tuning state.
    """
    if path is None or not path.exists():
        return TuningState(signature, path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = data["onnxamp"], data["format"]
        rows, waiting = _measurements(data["values"]), data.get("ahead", {}).items()
        ahead = {int(number): LocalSample(_measurements(values), _read(error)) for number, (error, values) in waiting}
        local = LocalErrors(int(data["samples"]), rows, _read(data["worst"]), ahead)
        errors = {key: _read(error) for key, error in data["errors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{str(path)!r} is not a tuning state ({error}): name another file.") from None
    if kind != ("tune", _FORMAT):
        raise ArgumentError(
            f"{str(path)!r} is not a tuning state that this version of onnxamp reads: name another file."
        )
    if data.get("signature") != signature:
        return TuningState(signature, path)
    return TuningState(signature, path, local, errors, frozenset(errors))


def _rows(values: Mapping[str, Measurement]) -> dict[str, list[Any]]:
    return {name: list(map(_written, astuple(row))) for name, row in values.items()}


def _measurements(rows: Mapping[str, list[Any]]) -> dict[str, Measurement]:
    return {name: Measurement(*map(_read, row)) for name, row in rows.items()}


def _written(number: float) -> float | str:
    return "inf" if number == inf else number


def _read(number: Any) -> Any:
    return float(number) if isinstance(number, str) else number


def fingerprint(words: Iterable[str], model: Model, samples: Samples) -> str:
    """A hash of settings, a model with all its weights, and samples. Complexity: linear in bytes."""
    digest, proto = sha256("\n".join(words).encode()), model.proto
    for piece in (proto.SerializeToString(deterministic=True) if not is_large(proto) else b"", *_contents(samples)):
        digest.update(piece)
    for tensor in proto.graph.initializer if is_large(proto) else ():
        digest.update(tensor.name.encode())
        if tensor.data_location != TensorProto.EXTERNAL:
            digest.update(tensor.raw_data)
            continue
        for block in blocks_of(read_array(tensor, model.folder)):
            digest.update(block.data)
    return digest.hexdigest()[:24]


def _contents(samples: Samples) -> Iterator[bytes]:
    for sample in samples:
        for name, feed in sample.items():
            yield name.encode()
            for array in feed if isinstance(feed, list) else [feed]:
                yield array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode()


def _digest(parts: Iterable[str]) -> str:
    """A short hash of texts in order."""
    return sha256("\n".join(parts).encode()).hexdigest()[:24]
