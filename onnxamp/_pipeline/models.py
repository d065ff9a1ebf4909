"""What a pipeline's function is given: models that run like sessions of ONNX Runtime, and note what they are fed."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from onnx import ModelProto, ValueInfoProto

from onnxamp._errors import ArgumentError
from onnxamp._graph.types import declared_type
from onnxamp._runtime.engines import Outputs
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Sample
from onnxamp._runtime.values import Feed

SAMPLES: Final = 4
"""Calls of each model that are kept at least, if there are so many; twice as many at most."""

_KINDS: Final = 8
"""Combinations of input shapes of which times are estimated."""

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""The shapes of a call's arrays, by input."""


class Entry(NamedTuple):
    """An input or an output, as ONNX Runtime describes it."""

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(slots=True)
class Calls:
    """What a function feeds to a model: how often, in which shapes, and some of the feeds, spread over all calls."""

    count: int = 0
    shapes: Counter[Shapes] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    stride: int = 1
    """Each call whose number is a multiple of this is kept."""

    def note(self, feeds: Mapping[str, Feed]) -> None:
        """Note a call. Complexity: linear in the bytes of calls that are kept."""
        arrays = (
            (name, feed.shape)
            for name, feed in sorted(feeds.items())
            if isinstance(feed, np.ndarray)
        )
        self.shapes[tuple(arrays)] += 1
        if self.count % self.stride == 0:
            self.samples.append({name: _copied(feed) for name, feed in feeds.items()})
        if len(self.samples) > 2 * SAMPLES:
            self.samples, self.stride = self.samples[::2], 2 * self.stride
        self.count += 1

    def kinds(self) -> list[tuple[Shapes, float]]:
        """Shapes, and how many calls have about these; not many, whatever is called."""
        found = sorted(self.shapes.items())
        step = -(-len(found) // _KINDS) or 1
        groups = [found[start : start + step] for start in range(0, len(found), step)]
        return [
            (group[len(group) // 2][0], float(sum(count for _, count in group))) for group in groups
        ]


def _copied(feed: Feed) -> Any:
    """A feed that does not change when the caller reuses its arrays."""
    if isinstance(feed, list):
        return [_copied(item) for item in feed]
    return feed.copy() if isinstance(feed, np.ndarray) else feed


@dataclass(slots=True)
class PipelineModel:
    """A model of a pipeline, for its function. It takes what ``onnxruntime.InferenceSession`` takes."""

    name: str
    proto: ModelProto
    """What it is fed must fit this."""
    runs: Callable[[Mapping[str, Feed]], Outputs]
    calls: Calls | None = None

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
    ) -> list[Any]:
        """The outputs of these names (None or empty: all), for arrays by input; run options are not obeyed.

        Raises:
            ArgumentError: the inputs do not fit the model, or it has no such output. RuntimeFailure: it does not run.
        """
        del run_options
        known = [entry.name for entry in self.proto.graph.output]
        names = list(output_names or known)
        if unknown := [name for name in names if name not in known]:
            raise ArgumentError(
                f"The model {self.name!r} has no output {unknown[0]!r}; it has {', '.join(known)}."
            )
        try:
            feeds = check_inputs(self.proto, input_feed)
        except ArgumentError as error:
            raise ArgumentError(
                f"The model {self.name!r} is fed what it does not take. {error}"
            ) from None
        if self.calls is not None:
            self.calls.note(feeds)
        outputs = self.runs(feeds)
        return [outputs[name] for name in names]

    def get_inputs(self) -> list[Entry]:
        """Name, type and shape of each input that must be fed."""
        weights = {tensor.name for tensor in self.proto.graph.initializer}
        return [_entry(item) for item in self.proto.graph.input if item.name not in weights]

    def get_outputs(self) -> list[Entry]:
        """Name, type and shape of each output."""
        return list(map(_entry, self.proto.graph.output))


def _entry(item: ValueInfoProto) -> Entry:
    dims = item.type.tensor_type.shape.dim
    shape: list[int | str | None] = [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims
    ]
    return Entry(item.name, declared_type(item.type) or "", shape)
