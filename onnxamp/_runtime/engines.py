"""Engines, which run models: ONNX Runtime on a provider, with or without emulation of low precision.

A model on an engine is a :class:`Session`. It runs whole, in one optimized session, as in production; or piece by
piece, so that all of its values can be observed. A reference runs as it was given, in one session without
optimizations, so that nothing that onnxamp does to models can spoil both sides of a comparison.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.records import record
from onnxamp._facts.providers import Profile, is_plugin
from onnxamp._model.model import Model, ModelSource
from onnxamp._runtime import BUDGET
from onnxamp._runtime.piecewise.branches import settled_flow
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.joined import joined_parts
from onnxamp._runtime.piecewise.memory import LOADING, free_bytes
from onnxamp._runtime.piecewise.parts import peak_of
from onnxamp._runtime.piecewise.pieces import Executor, run_together
from onnxamp._runtime.seeds import draws_numbers, with_seeds
from onnxamp._runtime.sessions.plugins import device_name, engine_called
from onnxamp._runtime.sessions.session import (
    Provider,
    assigned_nodes,
    choose_provider,
    make_session,
    run,
)
from onnxamp._runtime.sessions.starting import ModelFile
from onnxamp._runtime.sessions.values import Feeds, as_typed, check_inputs

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the work done so far and the total."""

_STEPS: Final = 1000
"""Steps of a part of the work."""
_MOST_NODES: Final = 8192
"""Nodes up to which a reference runs as it was given: ONNX Runtime loads in time that grows much faster than their
number.
"""

Outputs: TypeAlias = Mapping[str, Any]
"""Arrays by output; lists for sequences, dicts for maps, None for empty optionals."""


@record
class Engine:
    """An engine runs models. ONNX Runtime on the CPU computes float16 in float32 and so hides its errors, unless it is
    emulated; on CUDA, it runs on the first device.

    Attributes:
        provider: the provider of ONNX Runtime.
        emulates: compute low precision in float32 with explicit rounding.
        arithmetic: the target whose float16 sums emulations show; None for float32 sums.
    """

    provider: Provider
    emulates: bool = False
    arithmetic: Profile | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the float32 reference also runs here. On a plugin provider, float32 may be off already."""
        return not is_plugin(self.provider)

    @property
    def gpus(self) -> int:
        """GPUs of a cluster that a worker takes."""
        return int(self.provider == "cuda")

    @property
    def title(self) -> str:
        """The name in reports, if it computes float32: "CPU", "OpenVINO (hint dynamic) on ..."."""
        if self.provider == "cpu":
            return "CPU"
        if self.provider == "cuda":
            return f"CUDA ({device_name()})"
        return engine_called(self.provider).name

    def name(self, lowest: str = "float32") -> str:
        """Return the name in reports, such as "CUDA (device)" or "CPU, emulated float16".

        Args:
            lowest: the lowest precision of what it computes.
        """
        if lowest == "float32" or not self.emulates:
            return self.title
        whose = "" if self.arithmetic is None else f" of {self.arithmetic.name}"
        return f"{self.title}, emulated {lowest}{whose}"

    @property
    def reference(self) -> "Engine":
        """The engine of the float32 models that results are compared with."""
        return self if self.is_reference else Engine("cpu", emulates=True)

    @property
    def runtime(self) -> str:
        """The name of the engine, with its version."""
        import onnxruntime as ort  # noqa: PLC0415 - costs 0.1 s

        return f"onnxruntime {ort.__version__}"

    def open(
        self,
        model: ModelSource,
        *,
        whole: bool = False,
        budget: int = BUDGET,
        as_given: bool = False,
    ) -> "Session":
        """Return a model on this engine; arguments as :class:`Session`."""
        return Session(
            Model.of(model), self, whole=whole, budget=budget, as_given=as_given
        )

    def load(self, model: ModelFile) -> Any:
        """Load a model as a whole, with all fusions of ONNX Runtime.

        Raises:
            RuntimeFailure: the model does not load.
        """
        return make_session(model, self.provider)

    def run(self, loaded: Any, feeds: Feeds) -> dict[str, Any]:
        """Return the outputs of a loaded model by name. Feeds that it has no input for are ignored.

        Raises:
            RuntimeFailure: the model does not run.
        """
        entries = (*loaded.get_inputs(), *loaded.get_overridable_initializers())
        types = {item.name: item.type for item in entries}
        fed = {
            name: as_typed(feed, types[name])
            for name, feed in feeds.items()
            if name in types
        }
        return run(loaded, fed)

    def left_to_cpu(self, loaded: Any) -> Counter[str]:
        """Count the nodes of a loaded model that the engine leaves to the CPU, by op, if the engine names them."""
        nodes = () if self.is_reference else assigned_nodes(loaded)
        return Counter(op for provider, op, _ in nodes if provider == "CPU")


def engine_on(provider: Provider, *, emulates: bool | None = None) -> Engine:
    """Return the engine on a provider.

    Args:
        provider: the provider, which exists.
        emulates: compute low precision in float32 with explicit rounding; None to do so on the CPU alone.
    """
    return Engine(provider, provider == "cpu" if emulates is None else emulates)


def choose_engine(provider: Provider | None) -> Engine:
    """Return the engine on a provider that can be used here; arguments and errors as :func:`choose_provider`."""
    return engine_on(choose_provider(provider))


@dataclass(slots=True)
class SampleCache:
    """Arrays by number of the sample, as many as fit in memory: the outputs of a reference, or random inputs, that need
    not be computed again.
    """

    room: int = 64 << 20
    """Bytes that are left."""
    kept: dict[int, Outputs] = field(default_factory=dict)

    def keep(self, number: int, arrays: Outputs) -> None:
        """Keep the arrays of a sample if they fit."""
        size = sum(map(_bytes_of, arrays.values()))
        if arrays and number not in self.kept and size <= self.room:
            self.kept[number], self.room = arrays, self.room - size


_ENTRY: Final = 128
"""Approximate bytes of an entry of a dict, with its key and its number."""


def _bytes_of(output: Any) -> int:
    """Return the approximate memory of an output."""
    if isinstance(output, list):
        return sum(map(_bytes_of, output))
    if isinstance(output, Mapping):
        return _ENTRY * len(output)
    return int(np.asarray(output).nbytes)


@dataclass(slots=True)
class Session:
    """A model on an engine. The preparation for one sample (analysis, emulation, sessions) is reused for the next.

    Attributes:
        whole: run it in one optimized session instead of pieces, except for samples with empty optionals, which
            sessions cannot be fed.
        budget: bytes of values and weights that pieces hold at a time.
        as_given: run the model that was given, rather than the form that is prepared for pieces: without its functions,
            repaired, with the branches that a sample takes. Low precision that is emulated needs that form, and so do
            models that are too large for one session.
        outputs: its outputs for numbered samples, to compare others with.
        changed: why the model does not run as it was given, although it should; "" if it does.
        forced: the branches to take whatever a sample says, by the keys of their conditions; such a model runs in
            pieces.
        parts: whether outputs come with the parts that they join, unless the model runs whole.
    """

    model: Model
    engine: Engine
    whole: bool
    budget: int
    as_given: bool = False
    changed: str = ""
    outputs: SampleCache = field(default_factory=SampleCache)
    forced: Mapping[str, bool] = field(default_factory=dict)
    parts: bool = False
    _executor: Executor | None = None
    _prepared: Feeds | None = None
    """The sample that it was prepared for last: its conditions are not computed twice."""
    _loaded: Any = None
    """The model as a whole, which the first run loads."""
    _given: Any = None
    """The model as it was given, loaded."""
    _fits: tuple[DataflowGraph, bool] | None = None
    """Whether the model that was last prepared may run as it was given."""

    @property
    def seeded(self) -> Model:
        """The model that runs: its random ops draw what those of the other model do."""
        return self.model.ask(with_seeds)

    @property
    def joined(self) -> str:
        """Why pieces of the model do not run, although they do together; "" if they do."""
        return "" if self._executor is None else self._executor.joined

    def floats_of(self, outputs: Outputs) -> Iterator[npt.NDArray[Any]]:
        """Yield the floats among the model's own outputs, those of sequences included, as far as there are any."""
        for entry in self.model.proto.graph.output:
            output = outputs.get(entry.name)
            for array in output if isinstance(output, list) else [output]:
                if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
                    continue
                if array.size:
                    yield array

    def left_to_cpu(self) -> Counter[str]:
        """Count by op the nodes that the engine left to the CPU when the model ran whole."""
        if self._loaded is None:
            return Counter()
        return self.engine.left_to_cpu(self._loaded)

    def prepare(self, feeds: Feeds) -> Executor:
        """Return what runs pieces of the model on this sample; the same as before if the same branches are taken.

        Raises:
            As :func:`~onnxamp._runtime.piecewise.branches.settled_flow`.
        """
        if self._executor is not None and self._prepared is feeds:
            return self._executor
        executor = self._executor
        flow = settled_flow(
            self.seeded.proto,
            self.seeded.folder,
            feeds,
            emulated=self.engine.emulates,
            provider=self.engine.provider,
            before=executor,
            arithmetic=self.engine.arithmetic,
            forced=self.forced,
        )
        if executor is None or flow is not executor.flow:
            executor = Executor(flow, self.engine.provider)
        self._executor = executor
        self._prepared = feeds
        return executor

    def prepare_sample(self, sample: Feeds) -> Executor:
        """Prepare the model for an unchecked sample. Also raises ArgumentError if the sample does not fit."""
        return self.prepare(check_inputs(self.model.proto, sample))

    def runs_whole(self, feeds: Feeds) -> bool:
        """Return whether the sample runs in one session."""
        is_plain = self.whole and not self.forced
        return is_plain and all(feed is not None for feed in feeds.values())

    def alone(self) -> "Session":
        """Return the same model with outputs of its own; both share their preparation unless it draws numbers."""
        session = replace(self, outputs=SampleCache(), _prepared=None)
        session.restart()
        return session

    def anew(self, forced: Mapping[str, bool]) -> "Session":
        """Return the same model, prepared for samples of other sizes or for other branches."""
        session = replace(
            self,
            outputs=SampleCache(),
            forced=forced,
            _executor=None,
            _prepared=None,
            _loaded=None,
        )
        session.restart()
        return session

    def restart(self) -> None:
        """Forget outputs and sessions if the model draws numbers, so that the next run draws those of a first run."""
        if self.model.ask(draws_numbers):
            self.outputs = SampleCache()
            self._executor = self._prepared = self._loaded = self._given = None

    def run(
        self,
        feeds: Feeds,
        progress: Progress | None = None,
        also: Sequence[str] = (),
    ) -> Outputs:
        """Return the outputs by name.

        Args:
            also: other values to return, if the model computes them and does not run whole.

        Raises:
            RuntimeFailure: the model does not load or run. ArgumentError: it takes an input that is not fed.
        """
        if self.runs_whole(feeds):
            if self._loaded is None:
                source = self.seeded.path or self.seeded.embedded()
                self._loaded = self.engine.load(source)
            return self.engine.run(self._loaded, feeds)
        if not self.runs_as_given(feeds):
            return self._run_pieces([feeds], progress, also)[0]
        flow = self.prepare(feeds).flow
        try:
            outputs = self._run_given(feeds, lean=flow.large)
        except RuntimeFailure as error:
            outputs = self._run_pieces([feeds], progress, also)[0]
            self.changed = str(error)
            return outputs
        if not (also or self.parts_of(flow, flow)):
            return outputs
        return {**self._run_pieces([feeds], progress, also)[0], **outputs}

    def runs_as_given(self, feeds: Feeds) -> bool:
        """Return whether the sample runs in one session of the model that was given. Errors as :meth:`prepare`."""
        if (
            not self.as_given
            or self.changed
            or self.forced
            or any(feed is None for feed in feeds.values())
        ):
            return False
        flow = self.prepare(feeds).flow
        if self._fits is None or self._fits[0] is not flow:
            self._fits = flow, self._fits_whole(flow)
        return self._fits[1]

    def _fits_whole(self, flow: DataflowGraph) -> bool:
        """Return whether one session computes the same as the pieces of the model, within the available memory."""
        if flow.is_altered:
            return False
        nodes = range(len(flow.nodes))
        is_other = bool(self.model.repairs or self.model.proto.functions)
        room = max(self.budget, free_bytes() // LOADING if is_other else 0)
        size = self.model.stock.size + peak_of(
            flow, [[node] for node in nodes], flow.outputs
        )
        return size <= room and len(nodes) <= _MOST_NODES

    def _run_given(self, feeds: Feeds, *, lean: bool) -> Outputs:
        """Return the outputs of the model that was given; ``lean`` as for its pieces, so that kernels are the same.

        Raises:
            RuntimeFailure: it does not load or run.
        """
        if self._given is None:
            self._given = make_session(
                self.seeded,
                self.engine.provider,
                optimize=False,
                lean=lean,
            )
        return self.engine.run(self._given, feeds)

    def parts_of(self, flow: DataflowGraph, other: DataflowGraph) -> tuple[str, ...]:
        """Return the values that this model returns beside its outputs, and that another form also computes."""
        joined = flow.ask(joined_parts).values() if self.parts else ()
        names = dict.fromkeys(chain.from_iterable(joined))
        return tuple(name for name in names if name in other.maker)

    def run_sample(
        self, number: int, feeds: Feeds, progress: Progress | None = None
    ) -> Outputs:
        """:meth:`run` of a numbered sample, which does not run again as long as its outputs fit in memory."""
        if number not in self.outputs.kept:
            results = self.run(feeds, progress)
            self.outputs.keep(number, results)
            return results
        return self.outputs.kept[number]

    def run_together(self, samples: Sequence[Feeds]) -> list[Outputs]:
        """:meth:`run` of several samples; those that take the same branches share each large weight that is read."""
        is_one = any(map(self.runs_whole, samples))
        if is_one or all(map(self.runs_as_given, samples)):
            return list(map(self.run, samples))
        return self._run_pieces(samples)

    def _run_pieces(
        self,
        samples: Sequence[Feeds],
        progress: Progress | None = None,
        also: Sequence[str] = (),
    ) -> list[Outputs]:
        """Return the outputs of several samples, each in pieces."""
        results: list[Outputs] = []
        for executor, group in groupby(samples, self.prepare):
            flow = executor.flow
            others = [name for name in also if name in flow.maker]
            parts = self.parts_of(flow, flow)
            names = [*dict.fromkeys((*flow.outputs, *parts, *others))]
            executions = run_together(
                executor, list(group), names, self.budget, progress
            )
            results += (
                {name: execution.output(name) for name in names}
                for execution in executions
            )
        return results


def on_cpu(model: Model) -> Session:
    """Return a model on the CPU, as references run there."""
    return engine_on("cpu").open(model, as_given=True)


def progress_of_part(progress: Progress, part: int, parts: int) -> Progress:
    """Return the progress of one of several equal parts, which may differ in their number of steps."""

    def scaled(done: int, total: int) -> None:
        progress(part * _STEPS + done * _STEPS // max(total, 1), parts * _STEPS)

    return scaled
