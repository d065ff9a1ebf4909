"""Weights that become low precision, at once or while they are saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Final

from onnx import TensorProto

from onnxamp._dtypes import Format
from onnxamp._model.blobs import Blob, Given, Lowered, Weight
from onnxamp._model.external_data import INSIDE, data_location
from onnxamp._model.lowering import ConversionCounts, convert
from onnxamp._model.protos import stored_bytes
from onnxamp._model.weights import read_array

EXTERNAL_MIN: Final = 1024
"""Bytes; smaller tensors stay in the model file even if the others go to a data file."""

_PENDING: Final = f"{INSIDE}pending:"
"""Prefix of the location of a weight that is still to be converted; its number follows."""


@dataclass(slots=True)
class WeightConverter:
    """Makes low-precision versions of float32 tensors for :func:`onnxamp._rewrite.apply.apply_edits`.

    If ``deferred``, large data that are not in memory are not touched: the result is a placeholder, and
    :func:`onnxamp._model.saving.save_model` converts each tensor while it writes.
    """

    low: Format
    base_dir: Path | None
    deferred: bool = False
    _pending: list[Lowered | Given] = field(default_factory=list)
    _counts: dict[str, ConversionCounts] = field(default_factory=dict)
    _numbers: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, weights: Sequence[Weight]) -> list[TensorProto]:
        """The weights in low precision, or their placeholders; what is lost is counted under their names."""
        made = [self._empty(weight) for weight in weights]
        held = [pair for pair in zip(weights, made, strict=True) if pair[1].data_location != TensorProto.EXTERNAL]
        nearest = ((read_array(w.tensor, self.base_dir), w.saturate_at) for w, _ in held if w.chosen is None)
        converted = convert(nearest, self.low)
        for weight, tensor in held:
            data, lost = next(converted) if weight.chosen is None else weight.chosen
            tensor.raw_data = data if isinstance(data, bytes) else data.tobytes()
            known = self._counts.get(weight.name)
            self._counts[weight.name] = lost if known is None else known + lost
        return made

    def _empty(self, weight: Weight) -> TensorProto:
        """The low-precision tensor without data, or its placeholder."""
        tensor, elem = weight.tensor, self.low.elem
        made = TensorProto(name=tensor.name, doc_string=tensor.doc_string, data_type=elem, dims=tensor.dims[:])
        if tensor.metadata_props:
            made.metadata_props.extend(tensor.metadata_props)
        streamed = self.deferred and stored_bytes(made) >= EXTERNAL_MIN
        place = data_location(tensor, self.base_dir) if streamed else None
        if place is not None:
            made.data_location = TensorProto.EXTERNAL
            made.external_data.add(key="location", value=f"{_PENDING}{len(self._pending)}")
            self._numbers.setdefault(weight.name, []).append(len(self._pending))
            chosen = weight.chosen and Given(weight.chosen)
            self._pending.append(chosen or Lowered(place, self.low, weight.saturate_at))
        return made

    def pending(self, tensor: TensorProto) -> Lowered | Given | None:
        """What a placeholder stands for; None for any other tensor."""
        location = next((item.value for item in tensor.external_data if item.key == "location"), "")
        return self._pending[int(location.removeprefix(_PENDING))] if location.startswith(_PENDING) else None

    def share(self, known: Mapping[Blob, Blob]) -> None:
        """Replace pending blobs by the equal ones in ``known``, so that each is converted and counted once."""
        self._pending = [known.get(blob, blob) for blob in self._pending]  # type: ignore[misc]

    def counts(self) -> dict[str, ConversionCounts]:
        """What was lost, by name; weights that were pending count once they are written."""
        counts = dict(self._counts)
        for name, numbers in self._numbers.items():
            lost = (count for number in numbers for count in self._pending[number].lost)
            counts[name] = reduce(add, lost, counts.get(name, ConversionCounts()))
        return counts
