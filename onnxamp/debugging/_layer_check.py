"""Checking every layer of a model on samples, once, without a checker."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxamp._base import words
from onnxamp._base.errors import ArgumentError, ArgumentTypeError, warn
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp._options.doors import door
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.inputs.samples import SamplesLike, as_samples
from onnxamp._runtime.piecewise.flow import DataflowGraph, dtype_of
from onnxamp._runtime.sessions.session import Provider, choose_provider
from onnxamp.debugging._records import ValueRecord
from onnxamp.debugging._tensors import (
    DebugMode,
    NumericsWarning,
    checked_mode,
    tensor_stats,
)
from onnxamp.debugging._watch import RunRecords, Watcher


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """The records of one layer, for each sample (``step``) in turn.

    Attributes:
        inputs: the float inputs of the layer: values of other nodes, model inputs, and weights (only once).
        values: the float outputs of the nodes of the layer.

    Example:
        >>> from onnxamp.debugging import check_layer_numerics
        >>> check = check_layer_numerics("models/encoder.onnx", ".*attention.*")
        >>> check.bad
        ()
    """

    inputs: tuple[ValueRecord, ...]
    values: tuple[ValueRecord, ...]

    @property
    def bad(self) -> tuple[ValueRecord, ...]:
        """The records with NaN or unintended Inf, inputs first."""
        return tuple(row for row in (*self.inputs, *self.values) if row.is_bad)

    def __str__(self) -> str:
        return "\n".join(
            ["inputs", *map(str, self.inputs), "values", *map(str, self.values)]
        )


@door
@unchanged_sources()
def check_layer_numerics(
    model: ModelSource,
    layer: str | Iterable[str] | None = None,
    samples: SamplesLike | None = None,
    *,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
    provider: Provider | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
) -> LayerCheck:
    """Check the inputs, weights and values of a layer of a model.

    The counterpart of ``paddle.amp.debugging.check_layer_numerics``, which decorates the ``forward`` of a layer; here a
    layer is a set of nodes. The first NaN or unintended Inf is an error; other modes return all records and, except for
    CHECK_ALL, warn (:class:`NumericsWarning`).

    Args:
        model: a ModelProto with its weights loaded, a path, or an onnx-graphsurgeon Graph.
        layer: names of nodes or of their outputs; a string that is not a name is a regular expression for full names,
            such as ``"decoder/0/.*"``.
        samples: inputs of the *model*: a dict of arrays, an iterable of dicts, a path (.npz, .json or a folder), or
            :class:`onnxamp.Samples`; None for random ones.
        debug_mode: the reaction to a problem.
        provider: "cuda" or "cpu"; None for CUDA if there is a device. Low precision is emulated on both.
        seed, count, dims: the seed, number and named sizes of random samples.

    Raises:
        NumericsError: the mode aborts, and there is a NaN or an unintended Inf.
        ArgumentError: the layer has no node with float outputs, the samples do not fit the model, or ``debug_mode`` is
            not a DebugMode.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: the model cannot be read.
        RuntimeFailure: the model does not run.

    Example:
        >>> from onnxamp.debugging import check_layer_numerics
        >>> check = check_layer_numerics("models/encoder.onnx", ".*attention.*", count=2)
        >>> sorted({record.step for record in check.values})
        [0, 1]
    """
    if layer is None:
        raise ArgumentTypeError(
            "check_layer_numerics decorates no functions: call it with a model and the names of the nodes of a layer."
        )
    names: list[Any] = [layer]
    if isinstance(layer, Iterable) and not isinstance(layer, str):
        names = list(layer)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"layer must be the name of a node, or several names, not {layer!r}."
        )
    checked_mode(debug_mode)
    opened = Model.of(model)
    samples = as_samples(samples, opened, count=count, seed=seed, dims=dims)
    watcher = Watcher(engine_on(choose_provider(provider), emulates=True).open(opened))
    inputs: list[ValueRecord] = []
    values: list[ValueRecord] = []
    for step, sample in enumerate(samples):
        run = watcher.watch(step, sample)
        outputs = _outputs(run, names)
        values += outputs
        nodes = {run.nodes[row.tensor] for row in outputs}
        rows = chain.from_iterable(run.sources(output.tensor) for output in outputs)
        sources = {row.tensor: row for row in rows}
        read = [
            row for name, row in sources.items() if run.nodes.get(name) not in nodes
        ]
        if step == 0:  # weights are the same in all runs
            read += _weights(run.flow, nodes)
        inputs += read
        bad = LayerCheck(tuple(read), tuple(outputs)).bad
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT and bad:
            raise run.error("There is", bad[0], 1)
    alarming = [row for row in (*inputs, *values) if row.concerns(debug_mode)]
    if alarming and debug_mode is not DebugMode.CHECK_ALL:
        what = "NaN or Inf"
        if debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
            what = "Beyond float16"
        text = f"{what} in {words.count(len(alarming), 'value')} of the layer; the first is {alarming[0]}."
        warn([text], NumericsWarning)
    return LayerCheck(tuple(inputs), tuple(values))


def _outputs(run: RunRecords, names: Iterable[str]) -> list[ValueRecord]:
    """Return the records of the nodes with these names.

    Raises:
        ArgumentError: a name matches nothing.
    """
    produced = [run.records[name] for name in run.nodes]
    chosen: set[str] = set()
    for name in names:
        # A name comes first, because names may hold characters that mean something else in a regular expression.
        matches = _matching(produced, name.__eq__)
        matches = matches or _matching(produced, _compiled(name).fullmatch)
        if not matches:
            raise ArgumentError(
                f"No node with float outputs is called {name!r} or matches it as a regular expression; the first ones"
                f" are {', '.join(repr(row.node) for row in produced[:5]) or 'none'}."
            )
        chosen |= matches
    return [row for row in produced if row.tensor in chosen]


def _matching(
    records: Iterable[ValueRecord], fits: Callable[[str], object]
) -> set[str]:
    return {row.tensor for row in records if fits(row.node) or fits(row.tensor)}


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text))  # names may contain unbalanced brackets


def _weights(flow: DataflowGraph, nodes: Iterable[int]) -> Iterator[ValueRecord]:
    """Yield the records of the float weights of the nodes, including constants."""
    names = list[str]()
    for node in sorted(nodes):
        names += (*flow.held[node], *flow.reads[node])
    for name in dict.fromkeys(names):
        constant = flow.constants.get(name)
        if name in flow.shell.weights:
            array = flow.shell.array(name, raised=True)
        elif isinstance(constant, TensorProto):
            array = numpy_helper.to_array(constant)
        else:
            continue
        if array.dtype.kind == "f":
            yield ValueRecord.given(
                0,
                name,
                dtype_of(flow, name),
                tensor_stats(np.asarray(array)),
                is_excused=True,
            )
