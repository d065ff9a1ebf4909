"""Levels of training, with the meaning of ``mindspore.amp.build_train_network``, as options of the conversion.

=====  ===========================================  ==============  ==========
level  low precision                                normalisations  loss scale
=====  ===========================================  ==============  ==========
O0     nothing                                      float32         none
O1     white-listed ops                             float32         none
O2     all but black-listed ops                     float32         dynamic
O3     everything                                   low             none
auto   as O2 on CUDA; an error without CUDA device
=====  ===========================================  ==============  ==========

At O0, what was low precision in a model that was converted before remains so.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from onnx import ModelProto, NodeProto

from onnxamp._dtypes import BFLOAT16, FORMATS, dtype_name
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._graph.graph import Graph
from onnxamp._ops.facts import op_key
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._patterns.patterns import find_patterns, patterns_of
from onnxamp.train._gradients.normalisations import RUNNING, SCALED
from onnxamp.train._gradients.writer import MIN_OPSET
from onnxamp.train._masters import Masters
from onnxamp.train._step import OWN

NORMALISATIONS: Final = frozenset(
    {
        "BatchNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "LayerNormalization",
        "LpNormalization",
        "MeanVarianceNormalization",
        "RMSNormalization",
    }
)
LEVELS: Final = tuple(Level)
_LOW_CONVOLUTIONS: Final = 22
"""First opset at which ONNX Runtime's CUDA Conv takes bfloat16."""


class Norms(StrEnum):
    """What becomes of normalisations."""

    KEPT = "kept"
    """They stay float32."""
    AS_OTHERS = "as others"
    """They are treated as other ops are: hazards keep those written out in single ops in float32."""
    LOWERED = "lowered"
    """They are low, also those written out in single ops. At O1 nothing is that is not white-listed."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a training step.

    Attributes:
        options: of its conversion.
        norms: what becomes of normalisations.
        lowered: whether nodes of a converted model were low, by label; None for other models and levels.
        excludes: which nodes stay float32.
    """

    options: Options
    norms: Norms
    lowered: Mapping[str, bool] | None
    excludes: Callable[[NodeProto], bool]

    def opset(self, model: ModelProto) -> int:
        """The lowest opset at which the step can run."""
        convolves = any(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)
        is_bfloat16 = self.options.level != Level.O0 and self.options.low is BFLOAT16
        return _LOW_CONVOLUTIONS if is_bfloat16 and convolves else MIN_OPSET

    def options_for(self, model: ModelProto) -> Options:
        """Options for the conversion of the step of ``model``, which is in training mode."""
        options = self.options
        if self._lowers_norms():
            white = {
                **dict.fromkeys(NORMALISATIONS, "normalisations are not kept"),
                **options.preset.white,
            }
            black = {
                op: source
                for op, source in options.preset.black.items()
                if op not in NORMALISATIONS
            }
            options = replace(options, lists=replace(options.preset, white=white, black=black))
        return replace(options, rule=self._demands(model).of)

    def _lowers_norms(self) -> bool:
        return (
            self.norms is not Norms.KEPT and self.lowered is None and self.options.level != Level.O1
        )

    def _demands(self, model: ModelProto) -> "_Demands":
        """What is settled: excluded nodes, normalisations, and nodes of a converted model.

        What the step adds to the model stays float32. So do the statistics of low-precision batch normalisations: their
        squares would overflow, and the kernels of frameworks accumulate them in float32, too. Running statistics are
        state, as weights are.
        """
        excluded = {_label(node) for node in model.graph.node if self.excludes(node)}
        norms = {
            _label(node) for node in model.graph.node if op_key(node) in NORMALISATIONS
        } - excluded
        graph = Graph.of(model)
        were = _consistent(graph, self.lowered or {})
        low = {label for label, is_low in were.items() if is_low}
        kept = {OWN, *excluded, *(label for label, is_low in were.items() if not is_low)}
        kept |= {f"{label}/{RUNNING}" for label in norms}
        listed = {
            _label(node) for node in model.graph.node if op_key(node) in self.options.user_white
        }
        scaled = norms & (low | listed)
        if self.norms is Norms.KEPT:
            kept |= (norms - listed).union(*_written_out(graph))
            scaled &= listed
        elif self._lowers_norms():
            scaled = norms
            written = _written_out(graph) if self.norms is Norms.LOWERED else []
            low |= set[str]().union(*(names for names in written if names.isdisjoint(excluded)))
        return _Demands(
            frozenset(kept), frozenset(low), frozenset(f"{label}/{SCALED}" for label in scaled)
        )


@dataclass(frozen=True, slots=True)
class _Demands:
    """The precision of nodes by their names and the names of their outputs, for :attr:`Options.rule`.

    What is derived from a node, such as its gradient, has a name that starts with the name of the node and a slash.

    Attributes:
        kept: nodes that stay float32 with all that is derived from them.
        low: nodes that are low themselves.
        low_parts: what is low with all that is derived from it.
    """

    kept: frozenset[str]
    low: frozenset[str]
    low_parts: frozenset[str]

    def of(self, node: NodeProto) -> str | None:
        """The precision of a node; None where nothing is settled. Linear in the length of its names."""
        names = [name for name in (node.name, *node.output) if name]
        origins = {origin for name in names for origin in _origins(name)}
        if not self.kept.isdisjoint(origins):
            return "high"
        return (
            "low"
            if not (self.low.isdisjoint(names) and self.low_parts.isdisjoint(origins))
            else None
        )


def _origins(name: str) -> Iterator[str]:
    """The name, and all that it may be derived from."""
    end = len(name)
    while end > 0:
        yield name[:end]
        end = name.rfind("/", 0, end)


def _label(node: NodeProto) -> str:
    return node.name or node.output[0]


def _consistent(graph: Graph, lowered: Mapping[str, bool]) -> dict[str, bool]:
    """What was low, without nodes of decomposed ops that were low in part: such an op is converted as one."""
    consistent = dict(lowered)
    for match in graph.ask(find_patterns):
        labels = [graph.nodes[index].label for index in match.nodes]
        if len({lowered[label] for label in labels if label in lowered}) > 1:
            for label in labels:
                consistent.pop(label, None)
    return consistent


def _written_out(graph: Graph) -> list[frozenset[str]]:
    """Normalisations in single ops: names of the nodes of each, and of the values between them."""
    found = []
    for match in patterns_of(graph, "normalisation"):
        nodes = [graph.nodes[index] for index in match.nodes]
        found.append(
            frozenset(name for node in nodes for name in (node.label, *node.proto.output) if name)
        )
    return found


def make_precision(
    options: Options,
    masters: Masters,
    excludes: Callable[[NodeProto], bool],
    cast_model_type: object,
    keep_batchnorm_fp32: bool | None,
    *,
    on_cuda: bool,
) -> Precision:
    """The precision that the arguments of :func:`onnxamp.train.build_train_network` ask for.

    Raises:
        ArgumentError: the level is "auto", and there is no CUDA device.
        ArgumentTypeError: an argument has the wrong type, or ``cast_model_type`` is one that cannot be cast to.
    """
    if keep_batchnorm_fp32 is not None and not isinstance(keep_batchnorm_fp32, bool):
        raise ArgumentTypeError(
            f"keep_batchnorm_fp32 must be a bool, not {type(keep_batchnorm_fp32).__name__}."
        )
    norms = (
        None
        if keep_batchnorm_fp32 is None
        else Norms.KEPT
        if keep_batchnorm_fp32
        else Norms.LOWERED
    )
    if options.level == Level.AUTO:
        if not on_cuda:
            raise ArgumentError(
                "Level 'auto' needs a CUDA device, and there is none here: choose another level."
            )
        options = replace(options, level=Level.O2)
    if cast_model_type is not None:
        norms = norms or (Norms.KEPT if options.level == Level.O2 else Norms.LOWERED)
        dtype = dtype_name(cast_model_type)
        if dtype not in ("float32", *FORMATS):  # a TypeError in MindSpore, too
            raise ArgumentTypeError(
                f"cast_model_type must be float32, float16 or bfloat16, not {dtype}."
            )
        changes = {"level": Level.O0} if dtype == "float32" else {"level": Level.O3, "dtype": dtype}
        return Precision(replace(options, **changes), norms, None, excludes)
    if options.level == Level.O0 and masters.dtype is not None:
        was = Norms.KEPT if keep_batchnorm_fp32 else Norms.AS_OTHERS
        return Precision(
            replace(options, level=Level.O2, dtype=masters.dtype), was, masters.lowered, excludes
        )
    norms = norms or (Norms.AS_OTHERS if options.level == Level.O3 else Norms.KEPT)
    return Precision(options, norms, None, excludes)
