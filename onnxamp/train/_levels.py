"""The precision of a training step: levels, and models that :func:`decorate` gave low-precision weights.

Levels have the meaning of ``mindspore.amp.build_train_network``:

=====  ===========================================  =========================  ==========
level  low precision                                batch and layer norm       loss scale
=====  ===========================================  =========================  ==========
O0     nothing                                      float32                    none
O1     white-listed ops                             float32                    none
O2     all but black-listed ops                     float32                    dynamic
O3     everything                                   low, unless decomposed     none
auto   like O2 on CUDA; an error without CUDA
=====  ===========================================  =========================  ==========

The forward pass is decided as :func:`onnxamp.amp.auto_mixed_precision` decides it (:mod:`onnxamp.train._decided`), and
gradients by the lists of ``conservative``. At O0, a model that is already converted keeps its low precision.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any, Final, TypeAlias

from onnx import ModelProto, NodeProto

from onnxamp._amp import amp_level_of
from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.records import record
from onnxamp._decide.patterns.find import find_patterns, patterns_of
from onnxamp._decide.patterns.named import named_forms
from onnxamp._decide.problem import require_opset
from onnxamp._facts.dtypes import FORMATS, DtypeLike, dtype_name, low_type
from onnxamp._facts.kernels import takes_anywhere
from onnxamp._facts.ops import op_key
from onnxamp._graph.graph import Graph
from onnxamp._job.api import convert_as
from onnxamp._model.model import Model, ModelHolder
from onnxamp._options.doors import door
from onnxamp._options.lists import literal_preset, ops_named
from onnxamp._options.options import Options, Rule
from onnxamp._options.values import Level, checked_flag, checked_names, compiled
from onnxamp.train._decided import (
    COMPARED,
    COMPARISON,
    NORMALIZATIONS,
    Decided,
    Decisions,
    decide_forward,
)
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._step import TrainStep
from onnxamp.train._weights import Masters


class Norms(StrEnum):
    """The precision of normalizations."""

    KEPT = "kept"
    """Normalizations stay in float32, including decomposed ones."""
    AS_OTHERS = "as others"
    """Normalizations are treated like other ops: lists and hazards decide."""
    LOWERED = "lowered"
    """All normalizations are lowered, including decomposed ones. At O1, only white-listed ops are."""


@record
class Precision:
    """The precision of a training step.

    Attributes:
        forward: the options that decide the precision of the forward pass.
        options: the options that decide all the rest: those of the conversion of the step.
        norms: the precision of normalizations.
        lowered: whether each node of a converted model was low, by label; None for other models and levels.
        excludes: a function that returns why a node stays in float32.
    """

    forward: Options
    options: Options
    norms: Norms
    lowered: Mapping[str, bool] | None
    excludes: "Excluder"

    @property
    def is_exact(self) -> bool:
        """Whether the step is in float32."""
        return self.options.level == Level.O0

    def decide(self, model: ModelProto) -> Decisions:
        """Return the decisions about a model without functions: those of the conversion that the level names or, for a
        converted model, those of the conversion that it went through.
        """
        if self.is_exact:
            return Decisions({})
        graph = Graph.of(model)
        fixed = self._fixed(graph)
        if self.lowered is not None:
            were = _consistent(graph, self.lowered)
            nodes = (node for node in graph.nodes if node.label in were)
            given = {node.first_output: were[node.label] for node in nodes}
            return Decisions(given | fixed)
        options = self.forward
        if self._lowers_norms():
            lists = options.preset.without_black(NORMALIZATIONS)
            options = replace(options, lists=lists)
        return decide_forward(
            model, replace(options, rule=_first(fixed, options.rule))
        )

    def _lowers_norms(self) -> bool:
        is_lowered = self.norms is Norms.LOWERED and self.lowered is None
        return is_lowered and self.options.level != Level.O1

    def _fixed(self, graph: Graph) -> dict[str, bool]:
        """Return decisions that lists do not make, by first output: excluded nodes, normalizations, and ops whose
        gradient compares what the target cannot compare in low precision.
        """
        excluded = {
            node.first_output for node in graph.nodes if self.excludes(node.proto)
        }
        fixed = dict.fromkeys(excluded, False)
        listed = self.forward.user_white
        norms = (
            node for node in graph.nodes_of(NORMALIZATIONS) if node.key not in listed
        )
        if self.norms is Norms.KEPT:
            kept = (node.first_output for node in norms)
            fixed |= dict.fromkeys(chain(kept, *_written_out(graph)), False)
        elif self._lowers_norms():
            whole = (
                names for names in _written_out(graph) if names.isdisjoint(excluded)
            )
            fixed |= dict.fromkeys(chain.from_iterable(whole), True)
        target, low = self.options.target, self.options.low
        if not takes_anywhere(target, COMPARISON, low.tensor):
            compared = (node.first_output for node in graph.nodes_of(COMPARED))
            fixed |= dict.fromkeys(compared, False)
        return fixed


def _first(fixed: Decided, rule: Rule | None) -> Rule:
    """Return a rule for nodes with fixed decisions, which leaves all others to another rule."""

    def first(node: NodeProto) -> str | None:
        low = fixed.get(next(filter(None, node.output), ""))
        if low is not None:
            return "low" if low else "high"
        return rule(node) if rule else None

    return first


def _label(node: NodeProto) -> str:
    return node.name or node.output[0]


def _consistent(graph: Graph, lowered: Mapping[str, bool]) -> dict[str, bool]:
    """Return ``lowered`` without the nodes of decomposed ops that were only partly low, because such an op is converted
    as a whole.
    """
    consistent = dict(lowered)
    for match in graph.ask(find_patterns):
        labels = [graph.nodes[index].label for index in match.nodes]
        if len({lowered[label] for label in labels if label in lowered}) > 1:
            for label in labels:
                consistent.pop(label, None)
    return consistent


def _written_out(graph: Graph) -> Iterator[set[str]]:
    """Yield the first outputs of the nodes of each decomposed normalization."""
    for match in patterns_of(graph, "normalization"):
        yield {graph.nodes[index].first_output for index in match.nodes}


def make_precision(
    forward: Options,
    options: Options,
    masters: Masters,
    excludes: "Excluder",
    cast_model_type: object,
    keep_batchnorm_fp32: bool | None,
    *,
    on_cuda: bool,
) -> Precision:
    """Return the precision that the arguments of :func:`onnxamp.train.build_train_network` ask for.

    Raises:
        ArgumentError: the level is "auto", and there is no CUDA device.
        ArgumentTypeError: an argument has the wrong type, or ``cast_model_type`` is a type that cannot be cast to.
    """
    if keep_batchnorm_fp32 is not None:
        checked_flag("keep_batchnorm_fp32", keep_batchnorm_fp32)
    level = options.level
    dtype = options.dtype
    if level == Level.AUTO:
        if not on_cuda:
            raise ArgumentError(
                "Level 'auto' needs a CUDA device, and there is none here: choose another level."
            )
        level = Level.O2
    norms = Norms.AS_OTHERS
    lowered = None
    if cast_model_type is not None:
        cast = dtype_name(cast_model_type)
        if cast not in ("float32", *FORMATS):  # also a TypeError in MindSpore
            raise ArgumentTypeError(
                f"cast_model_type must be float32, float16 or bfloat16, not {cast}."
            )
        if cast == "float32":
            level = Level.O0
        else:
            dtype = cast
            # At O2, MindSpore casts the model and keeps what its black list names, which is what O2 does.
            if level != Level.O2:
                level = Level.O3
                norms = Norms.LOWERED
    elif level == Level.O0 and masters.dtype is not None:
        lowered = masters.lowered
        level = Level.O2
        dtype = masters.dtype
    if keep_batchnorm_fp32:
        norms = Norms.KEPT
    elif keep_batchnorm_fp32 is not None and lowered is None:
        norms = Norms.LOWERED
    return Precision(
        forward=replace(forward, level=level, dtype=dtype),
        options=replace(options, level=level, dtype=dtype),
        norms=norms,
        lowered=lowered,
        excludes=excludes,
    )


_SAVED: Final = (*FORMATS, "float32", "float64")


@dataclass(frozen=True, slots=True, eq=False)
class Decorated(ModelHolder):
    """A model decorated at level O2 by :func:`decorate`. All functions of onnxamp accept it instead of its ``model``.

    Attributes:
        model: the model with low-precision weights, an ordinary ModelProto.
        source: the original model. :func:`build_train_network` starts from its float32 weights, so decorating a model
            does not round the trained weights.
        dtype: the low-precision type, "float16" or "bfloat16".
        excluded: the layers that stay in float32.
        save_dtype: the type in which :meth:`TrainNetwork.export` stores weights; None for their types in ``model``.
        master_grad: whether all parts of a gradient are summed in float32.

    Example:
        >>> from onnxamp.train import decorate
        >>> decorated = decorate("models/classifier.onnx", level="O2", excluded_layers=["Gemm"])
        >>> decorated.dtype, decorated.excluded
        ('float16', ('Gemm',))
    """

    model: ModelProto
    source: ModelProto
    dtype: str
    excluded: tuple[str, ...]
    save_dtype: str | None = None
    master_grad: bool = False

    @property
    def stored(self) -> Mapping[str, str]:
        """The type of each weight that :meth:`TrainNetwork.export` does not store in float32."""
        tensors = self.source.graph.initializer
        if self.save_dtype is not None:
            return dict.fromkeys((tensor.name for tensor in tensors), self.save_dtype)
        low = FORMATS[self.dtype].elem
        tensors = self.model.graph.initializer
        return {
            tensor.name: self.dtype for tensor in tensors if tensor.data_type == low
        }

    def summed_in_float32(self, options: Options, step: TrainStep) -> Options:
        """Return the conversion options of a step; with ``master_grad``, the parts of a weight's gradient are summed in
        float32.
        """
        if not self.master_grad:
            return options
        makers = dict[str, NodeProto]()
        for node in step.model.graph.node:
            makers |= dict.fromkeys(node.output, node)
        sums = list[str]()
        for name, output in step.gradients.items():
            # Two Identities follow the gradient: one that names it, and one at the boundary of the halves.
            passed = makers[makers[output].input[0]]
            total = makers[passed.input[0]]
            if total.name.startswith(f"{name}/gradient/"):
                sums.append(re.escape(total.name))
        return replace(options, keep_high=(*options.keep_high, *sums))


@door
def decorate(
    models: Any,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    level: str = "O1",
    dtype: DtypeLike = "float16",
    master_weight: bool | None = None,
    save_dtype: str | DtypeLike | None = None,
    master_grad: bool = False,
    excluded_layers: str | Iterable[str] | None = None,
) -> Any:
    """Give models low-precision weights for training. The counterpart of ``paddle.amp.decorate``.

    At O1, models are returned unchanged. At O2, each becomes a :class:`Decorated`, converted with Paddle's lists, with
    float32 normalizations, inputs and outputs; pass it to :func:`build_train_network` at the default level. Training
    then keeps float32 masters of all weights.

    Args:
        models: a ModelProto, a path or an onnx-graphsurgeon Graph, or a list of them; they are not changed.
        optimizers: one or a list. They are returned unchanged, because their masters are always float32.
        level: "O1" or "O2", in either case.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a type of NumPy, ml_dtypes, ONNX or PyTorch.
        master_weight: None or True at O2. Without float32 masters, updates smaller than the last bit of a weight would
            be lost, so False is an error.
        save_dtype: the type in which :meth:`TrainNetwork.export` stores the trained weights at O2: "float16",
            "bfloat16", "float32" or "float64"; None for the type that each has in the decorated model. Checkpoints
            always hold the float32 masters.
        master_grad: at O2, if several nodes read a weight, sum the parts of its gradient in float32; otherwise
            they may be summed in low precision. Everything that happens to gradients after the backward pass
            (unscaling, accumulation over batches, clipping, the update) is always in float32.
        excluded_layers: layers that stay in float32 at O2: op types, by the names of ONNX, MindSpore or Paddle, or
            regular expressions for full node names.

    Returns:
        One model for one model, a list for a list; with optimizers, a pair of models and optimizers.

    Raises:
        ArgumentError: a value is unknown, or an excluded layer is in no model.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: a model cannot be read or is invalid.

    Example:
        >>> from onnxamp.train import SGD, build_train_network, decorate
        >>> decorated, optimizer = decorate("models/classifier.onnx", SGD(), level="O2")
        >>> net = build_train_network(decorated, optimizer, "cross-entropy")
    """
    level = amp_level_of(level, ("O1", "O2"), "decorate")
    name = low_type(dtype).name
    saved = None if save_dtype is None else dtype_name(save_dtype)
    if saved is not None and saved not in _SAVED:
        raise ArgumentError(
            f"Unknown save_dtype {saved!r}: choose one of {', '.join(_SAVED)}."
        )
    given = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    wrong = [item for item in given if not isinstance(item, Optimizer)]
    if wrong and optimizers is not None:
        raise ArgumentTypeError(
            f"optimizers must be from onnxamp.train, not {type(wrong[0]).__name__}."
        )
    if not isinstance(master_weight, bool | None):
        raise ArgumentTypeError(
            f"master_weight must be a bool or None, not {master_weight!r}."
        )
    master_grad = checked_flag("master_grad", master_grad)
    excluded = _texts(excluded_layers)
    if level == "O2":
        if master_weight is False:
            raise ArgumentError(
                "master_weight=False is not supported: training keeps float32 masters. Leave it None."
            )
        several = isinstance(models, (list, tuple))
        matched = set[str]()
        results = list[Decorated]()
        options = decorating_options(name)
        for model in models if several else [models]:
            source = Model.of(model).embedded()
            rule = decorating_rule(excluder(excluded, source), matched)
            low = convert_as(source, replace(options, rule=rule))
            # Export stores weights with Casts, which the opset must have.
            if saved in FORMATS:
                require_opset(source, Options.of("O2", {"dtype": saved}))
            results.append(Decorated(low, source, name, excluded, saved, master_grad))
        models = results if several else results[0]
        if unmatched := [text for text in excluded if text not in matched]:
            raise ArgumentError(
                f"excluded_layers: no node has the name or op type {unmatched[0]!r}."
            )
    return models if optimizers is None else (models, optimizers)


def decorating_rule(excludes: "Excluder", matched: set[str] | None = None) -> Rule:
    """Return a rule that keeps normalizations and excluded layers in float32, and adds the layers it matches to
    ``matched``.
    """

    def rule(node: NodeProto) -> str | None:
        reasons = excludes(node)
        if matched is not None:
            matched.update(reasons)
        return "high" if reasons or op_key(node) in NORMALIZATIONS else None

    return rule


Excluder: TypeAlias = Callable[[NodeProto], Collection[str]]
"""A function that returns the excluded layers that a node belongs to."""


def decorating_options(dtype: DtypeLike | str) -> Options:
    """Return the options for decorating models and for training decorated models."""
    preset = literal_preset("paddle")
    return Options.of("O2", {"dtype": dtype, "lists": preset, "fold": False})


def excluder(layers: str | Iterable[str] | None, model: ModelProto) -> Excluder:
    """Return a function that returns which of these op names and regular expressions (for full names) match a node.

    Raises:
        ArgumentError: a regular expression is invalid.
        ArgumentTypeError: an item is not a string.
    """
    texts = _texts(layers)
    patterns = dict(zip(texts, compiled("excluded_layers", texts), strict=True))
    if not texts:
        return lambda _: ()
    graph = Graph.of(model)
    meant = dict[str, set[str]]()
    for text in texts:
        nodes = (graph.nodes[index] for index in graph.ask(named_forms, text))
        meant[text] = {node.label for node in nodes}

    def matched(node: NodeProto) -> set[str]:
        names = [name for name in (node.name, *node.output) if name]
        return {
            text
            for text, pattern in patterns.items()
            if op_key(node) in ops_named(text)
            or _label(node) in meant[text]
            or any(map(pattern.fullmatch, names))
        }

    return matched


def _texts(layers: str | Iterable[str] | None) -> tuple[str, ...]:
    return checked_names(
        "excluded_layers", [layers] if isinstance(layers, str) else layers
    )
