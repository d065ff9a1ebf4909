"""The second step of planning edits: new Casts, and the copies and nodes that replace Casts.

Complexity: linear in the versions of values.
"""

from onnx import TensorProto

from onnxamp._decide.precision import Decision
from onnxamp._decide.problem import Problem
from onnxamp._graph.editor import NewNames
from onnxamp._graph.view import ABSENT
from onnxamp._rewrite.edits.apply import NewCast, NewConstant, NewDequantize
from onnxamp._rewrite.edits.mask_bounds import STEPS, MaskBound
from onnxamp._rewrite.edits.value_names import How, Names, Version


def find_casts(
    problem: Problem, decision: Decision, names: Names, new: NewNames
) -> tuple[list[NewCast], list[NewConstant], list[NewDequantize]]:
    """Return what makes the versions that values need: Casts, second copies of constants, and second nodes that
    dequantize.

    Args:
        problem: the problem.
        decision: its solution.
        names: the names of values, and the versions.
        new: gives names that are not taken.
    """
    casting = [one for one in names.versions if one.how is How.CAST]
    copying = [one for one in names.versions if one.how is How.COPY]
    twofold = [one for one in names.versions if one.how is How.DEQUANTIZED]
    values = problem.graph.values
    twofold.sort(key=lambda version: values[version.value].producer, reverse=True)
    casts = [_cast(problem, version, new) for version in casting]
    copies = [_copy(problem, version, new) for version in copying]
    dequantized = [
        _dequantize(problem, decision, names, version, new) for version in twofold
    ]
    return casts, copies, dequantized


def _bound(problem: Problem, version: Version, new: NewNames) -> MaskBound | None:
    """Return how a mask is bounded, if a Cast to low precision is of one: it would become infinite."""
    masks = problem.masks
    if not version.low or version.value not in masks.values:
        return None
    result = new.fresh(f"{version.source}_bounded")
    axis = masks.shifts.get(version.value)
    return MaskBound(
        result=result,
        names=[new.fresh(f"{result}/{step}") for step in STEPS]
        if axis is not None
        else (),
        is_capped=version.value in masks.subtracted,
        axis=axis,
        is_emptying=version.value in masks.emptying,
    )


def _cast(problem: Problem, version: Version, new: NewNames) -> NewCast:
    """Return a Cast right after the value's producer, shielded if a fusion would absorb it, of a bounded mask."""
    is_shielded = not version.low and version.value in problem.absorbed
    value = problem.graph.values[version.value]
    return NewCast(
        scope=value.scope,
        after=value.producer,
        source=version.source,
        target=version.name,
        elem=problem.options.low.elem if version.low else TensorProto.FLOAT,
        shield=new.fresh(f"{version.name}_cast") if is_shielded else "",
        bound=_bound(problem, version, new),
        name=new.fresh(f"{version.name}/Cast"),
        value=version.value,
    )


def _copy(problem: Problem, version: Version, new: NewNames) -> NewConstant:
    """Return the second copy of a constant."""
    is_node = problem.graph.values[version.value].producer != ABSENT
    return NewConstant(
        value=version.value,
        name=version.name,
        node_name=new.fresh(f"{version.name}/Constant") if is_node else "",
        low=version.low,
    )


def _dequantize(
    problem: Problem,
    decision: Decision,
    names: Names,
    version: Version,
    new: NewNames,
) -> NewDequantize:
    """Return the second node that dequantizes a value."""
    index = problem.graph.values[version.value].producer
    node = problem.graph.nodes[index]
    is_low = decision.is_low(problem.ports.produced[node.outputs[0]])
    scale = node.proto.input[1]
    # The type of the scale is that of the result, and this node has the other one, unless an attribute states it.
    if node.inputs[1] in names.of:
        scale = names.of[node.inputs[1]][not is_low]
    return NewDequantize(
        node=index,
        scale=scale,
        target=version.name,
        name=new.fresh(f"{version.name}/{node.proto.op_type}"),
        elem=TensorProto.FLOAT if is_low else problem.options.low.elem,
    )
