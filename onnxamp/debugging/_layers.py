"""Looking at one layer of a model: what goes in, its weights, and what each of its ops makes of them."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxamp._errors import ArgumentError, ArgumentTypeError, NumericsError
from onnxamp._model.model import Model, ModelSource
from onnxamp._runtime.flow import Flow, dtype_of
from onnxamp._runtime.samples import SamplesLike, as_samples
from onnxamp._runtime.session import Provider, choose_provider
from onnxamp.debugging._modes import DebugMode
from onnxamp.debugging._records import ValueRecord, counted
from onnxamp.debugging._tensors import NumericsWarning, tensor_stats
from onnxamp.debugging._watch import Looked, Watcher


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """Records of one layer, for each sample (``step``) in turn.

    ``inputs`` are the floats that come from outside: values of other nodes, inputs of the model, and weights; those of
    the first sample stand for all where they are weights. ``values`` are what the layer's nodes make.
    """

    inputs: tuple[ValueRecord, ...]
    values: tuple[ValueRecord, ...]

    @property
    def bad(self) -> tuple[ValueRecord, ...]:
        """Those with NaN or Inf that is no intention, inputs first."""
        return tuple(row for row in (*self.inputs, *self.values) if row.is_bad)

    def __str__(self) -> str:
        return "\n".join(["inputs", *map(str, self.inputs), "values", *map(str, self.values)])


def check_layer_numerics(
    model: ModelSource,
    layer: str | Iterable[str],
    samples: SamplesLike | None = None,
    *,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
    provider: Provider | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
) -> LayerCheck:
    """Check what goes into a layer of a model and what its ops make of it.

    In Paddle this is a decorator for the ``forward`` of a layer; here a layer is some nodes of a model. As there, the
    first NaN or Inf is an error; other modes return all and, but for CHECK_ALL, warn (:class:`NumericsWarning`).

    Args:
        model: a proto with its weights loaded, or the path of a file.
        layer: names of nodes or of their outputs; what names none is a regular expression that whole names match:
            ``"decoder/0/.*"``.
        samples: inputs of the *model*: Samples, a path, a dict of arrays by input, or an iterable of such dicts; made
            up (seeded, ``count`` of them, sizes from ``dims``) where None.
        debug_mode: what happens where something is found.
        provider: "cuda" or "cpu"; None for CUDA where there is one. Low values are emulated on both.

    Raises:
        NumericsError: the mode aborts, and there is NaN or Inf that is no intention.
        ArgumentError: the layer has no node that makes floats, or the samples do not fit the model.
        ModelError: the model cannot be read. RuntimeFailure: it does not run.
    """
    names = [layer] if isinstance(layer, str) else list(layer)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"layer must be the name of a node, or several, not {layer!r}.")
    opened = Model.of(model)
    samples = as_samples(samples, opened, count=count, seed=seed, dims=dims)
    watcher = Watcher(opened.proto, opened.folder, choose_provider(provider))
    inputs: list[ValueRecord] = []
    values: list[ValueRecord] = []
    for step, sample in enumerate(samples):
        looked = watcher.look(step, sample)
        mine = _mine(looked, names)
        values += mine
        nodes = {looked.nodes[row.tensor] for row in mine}
        read = {row.tensor: row for one in mine for row in looked.sources(one.tensor)}
        inputs += [row for name, row in read.items() if looked.nodes.get(name) not in nodes]
        inputs += _weights(looked.flow, nodes) if step == 0 else ()
        found = LayerCheck(tuple(inputs), tuple(values))
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT and found.bad:
            bad = found.bad[0]
            text = f"There is NaN or Inf in {bad}. {looked.story(bad, 1)}".rstrip()
            raise NumericsError(text, bad.tensor, bad.node, bad.op)
    told = [row for row in (*inputs, *values) if row.concerns(debug_mode)]
    if told and debug_mode is not DebugMode.CHECK_ALL:
        what = "Beyond float16" if debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW else "NaN or Inf"
        text = f"{what} in {counted(told)} of the layer; the first is {told[0]}."
        warnings.warn(text, NumericsWarning, stacklevel=2)
    return LayerCheck(tuple(inputs), tuple(values))


def _mine(looked: Looked, names: Iterable[str]) -> list[ValueRecord]:
    """What the nodes that are meant make.

    Raises:
        ArgumentError: a name names nothing.
    """
    made = [looked.records[name] for name in looked.nodes]
    chosen: set[str] = set()
    for name in names:
        found = {row.tensor for row in made if name in (row.node, row.tensor)}
        if not found:
            pattern = _compiled(name)
            found = {row.tensor for row in made if pattern.fullmatch(row.node) or pattern.fullmatch(row.tensor)}
        if not found:
            raise ArgumentError(
                f"No node that makes floats is called {name!r} (or matches it as a regular expression); the first ones"
                f" are {', '.join(repr(row.node) for row in made[:5]) or 'none'}."
            )
        chosen |= found
    return [row for row in made if row.tensor in chosen]


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text))  # names hold brackets of all kinds


def _weights(flow: Flow, nodes: Iterable[int]) -> Iterator[ValueRecord]:
    """Float weights of the nodes, those that are constant included."""
    order = sorted(nodes)
    for name in dict.fromkeys(name for node in order for name in (*flow.held[node], *flow.reads[node])):
        constant = flow.constants.get(name)
        if name in flow.shell.weights:
            array = flow.shell.array(name, raised=True)
        elif isinstance(constant, TensorProto):
            array = numpy_helper.to_array(constant)
        else:
            continue
        if array.dtype.kind == "f":
            stats = tensor_stats(np.asarray(array))
            fault = None if not stats.num_nan else "NaN"  # infinities may be meant: masks
            yield ValueRecord(0, -1, "", "", name, dtype_of(flow, name), stats, fault, inherited=False)
