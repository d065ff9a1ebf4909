"""The pipeline up to the decision: view, facts, hazards, variables, pins, cut, edits. Read-only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from onnxamp.collecting import no_collections
from onnxamp.constants import Constants
from onnxamp.edits import Edits
from onnxamp.errors import OpsetError
from onnxamp.folds import batch_norm_folds, skip_sums
from onnxamp.graph import View, opset_imports
from onnxamp.hazards import find_hazards
from onnxamp.infer import Types, infer_types
from onnxamp.islands import activation_groups, cast_swallowing_inputs, written_out_norms
from onnxamp.masks import sentinel_paths
from onnxamp.ops import is_exact, op_facts
from onnxamp.pins import Pins, find_pins
from onnxamp.placement import make_edits
from onnxamp.policy import Level, Policy
from onnxamp.precision import Decision, Prices, decide
from onnxamp.resolve import view_model
from onnxamp.scene import Scene
from onnxamp.sizes import Shape, infer_shapes
from onnxamp.terms import Terms
from onnxamp.variables import find_variables
from onnxamp.verdicts import Hazard
from onnxamp.wishes import find_wishes


@dataclass(frozen=True, slots=True)
class Analysis:
    """All that is known about a model under a policy, and what follows from it."""

    policy: Policy
    view: View
    types: Types
    shapes: Sequence[Shape | None]
    terms: Terms
    hazards: Sequence[Hazard]
    pins: Pins
    joined: Mapping[int, int]
    decision: Decision
    edits: Edits


@no_collections()
def analyse(
    model: ModelProto,
    policy: Policy,
    *,
    base_dir: Path | None = None,
    replay: Mapping[str, bool] | None = None,
    opsets: Mapping[str, int] | None = None,
    prices: Prices | None = None,
) -> Analysis:
    """Decide for every float of the model in which precision it lives.

    Args:
        base_dir: folder of the model's external data, None where all weights are inline.
        opsets: decide as if the model had these opset imports.
        replay: decisions to repeat (variable key -> low), see :mod:`onnxamp.plan`.
        prices: what was measured of nodes, for level auto.

    Raises:
        ModelError: the model breaks a rule of ONNX. OpsetError: it is too old for the low type.
        ContradictionError: wishes of the user exclude each other.

    Complexity: near linear in nodes; weights are read twice at most.
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
    if judged and replay is None:  # a plan has settled these already, perhaps otherwise
        soft = [group for group in activation_groups(view, constants) if not wishes.of_node.keys() & set(group)]
        groups = [*soft, *folds, *(nodes for _, nodes in norms), *(sentinels if policy.hazards else ())]
    terms = find_variables(view, types, policy, groups)
    hazards = find_hazards(scene) if judged else []
    exact = (node for node in view.nodes if node.key in op_facts().exact and is_exact(node.proto))
    moved = frozenset(node.index for node in exact if constants.feed(node))
    folded = frozenset(bn for _, bn in folds)
    pins = find_pins(view, policy, terms, hazards, wishes=wishes, folded=folded, moved=moved, replay=replay,
                     measured=prices.pins if prices else None)  # fmt: skip
    joined = skip_sums(view, shapes, constants, norms)
    decision = decide(view, shapes, constants, terms, pins, prices, joined)
    edits = make_edits(view, types, terms, decision, policy.low, frozenset(swallowing))
    _halve(edits, sentinels, view, terms, decision, constants)
    return Analysis(policy, view, types, shapes, terms, hazards, pins, joined, decision, edits)


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


def _halve(
    edits: Edits, sentinels: Sequence[Sequence[int]], view: View, terms: Terms, decision: Decision, constants: Constants
) -> None:
    """Sentinels on a mask path that is low saturate to half the range, so that mask + score stays finite."""
    for index in {node for path in sentinels for node in path}:
        node = view.nodes[index]
        for value, term in zip(node.inputs, terms.consumed[index], strict=True):
            stats = constants.stats(value) if decision.is_low(term) else None
            if stats is not None and stats.has_sentinel:
                edits.halved.add(constants.source(value))
