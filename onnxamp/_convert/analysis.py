"""The pipeline up to the decision: view, facts, hazards, variables, pins, cut, edits. Read-only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from onnx import ModelProto

from onnxamp._decide.hazards import find_hazards
from onnxamp._decide.masks import sentinel_paths
from onnxamp._decide.overrides import Wishes, find_wishes
from onnxamp._decide.pins import Pins, find_pins
from onnxamp._decide.policy import Level, Policy
from onnxamp._decide.precision import Decision, Prices, decide
from onnxamp._decide.terms import Terms
from onnxamp._decide.variables import find_variables
from onnxamp._decide.verdicts import Hazard
from onnxamp._errors import OpsetError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.constants import Constants
from onnxamp._graph.resolve import view_model
from onnxamp._graph.scene import Scene
from onnxamp._graph.shapes import Shape, infer_shapes
from onnxamp._graph.types import Types, infer_types
from onnxamp._graph.view import View, opset_imports
from onnxamp._ops.facts import is_exact, op_facts
from onnxamp._patterns.fusion_groups import batch_norm_folds, skip_sums
from onnxamp._patterns.islands import activation_groups, cast_swallowing_inputs, written_out_norms
from onnxamp._rewrite.edits import Edits
from onnxamp._rewrite.plan_edits import make_edits


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is known about a model under a policy before anything is decided."""

    policy: Policy
    view: View
    types: Types
    shapes: Sequence[Shape | None]
    constants: Constants
    terms: Terms
    hazards: Sequence[Hazard]
    wishes: Wishes
    sentinels: Sequence[Sequence[int]]
    """See :func:`onnxamp._decide.masks.sentinel_paths`."""
    folded: frozenset[int]
    """Normalisations that are folded into what is in front of them."""
    moved: frozenset[int]
    """Exact ops on constants alone."""
    joined: Mapping[int, int]
    """See :func:`onnxamp._patterns.fusion_groups.skip_sums`."""
    swallowing: frozenset[int]
    """Inputs of :func:`onnxamp._patterns.islands.cast_swallowing_inputs`."""


@dataclass(frozen=True, slots=True)
class Analysis(Survey):
    """What is known about a model, and what follows from it."""

    pins: Pins
    decision: Decision
    edits: Edits


def analyse(
    model: ModelProto,
    policy: Policy,
    *,
    base_dir: Path | None = None,
    replay: Mapping[str, bool] | None = None,
    opsets: Mapping[str, int] | None = None,
) -> Analysis:
    """Decide for every float of the model in which precision it lives.

    Args:
        base_dir: folder of the model's external data, None where all weights are inline.
        opsets: decide as if the model had these opset imports.
        replay: decisions to repeat (variable key -> low), see :mod:`onnxamp._convert.plan`.

    Raises:
        ModelError: the model breaks a rule of ONNX. OpsetError: it is too old for the low type.
        ContradictionError: wishes of the user exclude each other.

    Complexity: near linear in nodes; weights are read twice at most.
    """
    known = survey(model, policy, base_dir=base_dir, opsets=opsets, settled=replay is not None)
    return decided(known, replay=replay)


@no_collections()
def survey(
    model: ModelProto,
    policy: Policy,
    *,
    base_dir: Path | None = None,
    opsets: Mapping[str, int] | None = None,
    settled: bool = False,
) -> Survey:
    """The part of :func:`analyse` in front of its decision. Arguments and errors are the same.

    Args:
        settled: leave to a plan what goes with what.
    """
    check_opset(model, policy)
    view = view_model(model, freeze_defaults=policy.freeze_defaults, opsets=opsets)
    types = infer_types(view)
    shapes = infer_shapes(view, types)
    constants = Constants(view, types, policy.low, base_dir)
    judged = policy.level != Level.O0
    norms = written_out_norms(view, types, shapes, constants) if judged else []
    swallowing = cast_swallowing_inputs(view, types, shapes, constants, policy.low, norms)
    scene = Scene(view, types, shapes, constants, policy.low, norms, swallowing)
    sentinels = sentinel_paths(scene) if judged else []
    wishes = find_wishes(view, policy)
    folds = batch_norm_folds(view, types, constants, policy) if judged else []
    folds = [pair for pair in folds if not wishes.of_node.keys() & set(pair)]
    groups: list[Sequence[int]] = []
    if judged and not settled:  # a plan has settled these already, perhaps otherwise
        soft = [group for group in activation_groups(view, constants) if not wishes.of_node.keys() & set(group)]
        groups = [*soft, *folds, *(nodes for _, nodes in norms), *(sentinels if policy.hazards else ())]
    terms = find_variables(view, types, policy, groups)
    hazards = find_hazards(scene) if judged else []
    exact = (node for node in view.nodes if node.key in op_facts().exact and is_exact(node.proto))
    moved = frozenset(node.index for node in exact if constants.feed(node))
    folded = frozenset(bn for _, bn in folds)
    joined = skip_sums(view, shapes, constants, norms)
    return Survey(
        policy, view, types, shapes, constants, terms, hazards, wishes, sentinels, folded, moved, joined,
        frozenset(swallowing),
    )  # fmt: skip


@no_collections()
def decided(known: Survey, *, replay: Mapping[str, bool] | None = None, prices: Prices | None = None) -> Analysis:
    """The part of :func:`analyse` behind what is known: an analysis can be decided again, for other prices.

    Args:
        prices: what was measured of nodes, for level auto.
    """
    view, policy, terms = known.view, known.policy, known.terms
    pins = find_pins(
        view, policy, terms, known.hazards, wishes=known.wishes, folded=known.folded, moved=known.moved, replay=replay,
        measured=prices.pins if prices else None,
    )  # fmt: skip
    decision = decide(view, known.shapes, known.constants, terms, pins, prices, known.joined)
    edits = make_edits(view, known.types, terms, decision, policy.low, known.swallowing)
    _halve(edits, known, decision)
    facts = {field.name: getattr(known, field.name) for field in fields(Survey)}
    return Analysis(**facts, pins=pins, decision=decision, edits=edits)


def check_opset(model: ModelProto, policy: Policy) -> None:
    """Refuse a model whose opset has no Cast to the low type.

    Raises:
        OpsetError: it has none.
    """
    version, low = opset_imports(model)[""], policy.low
    if version < low.min_opset and policy.level != Level.O0:
        raise OpsetError(
            f"The model's opset {version} cannot cast to {low.name}, which needs opset {low.min_opset}: convert it"
            f" with opset={low.min_opset} (--opset {low.min_opset})."
        )


def _halve(edits: Edits, known: Survey, decision: Decision) -> None:
    """Sentinels on a mask path that is low saturate to half the range, so that mask + score stays finite."""
    for index in {node for path in known.sentinels for node in path}:
        node = known.view.nodes[index]
        for value, term in zip(node.inputs, known.terms.consumed[index], strict=True):
            stats = known.constants.stats(value) if decision.is_low(term) else None
            if stats is not None and stats.has_sentinel:
                edits.halved.add(known.constants.source(value))
