"""What a newer opset would give: kernels and types that the model's opset does not have."""

from pathlib import Path

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis, analyse
from onnxamp._decide.policy import Level
from onnxamp._decide.verdicts import Reason
from onnxamp._dtypes import FLOAT, retyped
from onnxamp._errors import OnnxAmpError
from onnxamp._graph.view import Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import newer_versions
from onnxamp._target.kernels import freedom


def opset_hint(model: ModelProto, analysis: Analysis, base_dir: Path | None) -> str | None:
    """How many Casts vanish with a newer opset, if nodes stay float32 only because of the model's.

    M is the first opset at which all those ops that ever get a low kernel have one. The model is analysed a second
    time as if it had that opset; nothing is upgraded.
    """
    if analysis.policy.level == Level.O0:
        return None
    current, wanted, known = analysis.view.book.opsets[""], 0, dict[tuple[str, int], int]()
    for node in analysis.view.nodes:
        if node.signature is None or node.signature.domain or not _is_held_back(analysis, node):
            continue
        key = (node.key, node.signature.since)
        if key not in known:
            known[key] = _first_opset(analysis, node)
        wanted = max(wanted, known[key])
    if wanted <= current:
        return None
    opsets = {**analysis.view.book.opsets, "": wanted}
    try:
        casts = len(analyse(model, analysis.policy, base_dir=base_dir, opsets=opsets).edits.casts)
    except OnnxAmpError:
        return None
    saved, before = len(analysis.edits.casts) - casts, len(analysis.edits.casts)
    ops = ", ".join(sorted({key for (key, _), version in known.items() if version}))
    if saved > 0:
        return f"{saved} of {before} new Casts vanish with --opset {wanted}, which brings low kernels for {ops}."
    return f"--opset {wanted} brings low kernels for {ops}; at opset {current} there are none."


def _is_held_back(analysis: Analysis, node: Node) -> bool:
    """Whether the node is float32 for want of a kernel, or because its schema does not admit the low type yet."""
    bound = analysis.terms.bound.get(node.index, {})
    variables = analysis.terms.of_node.get(node.index, {})
    for variable in variables.values():
        pin = analysis.pins.verdicts.get(analysis.terms.root(variable))
        if pin is not None and pin.reason is Reason.NO_KERNEL and pin.variable == variable:
            return True
    pinned = op_facts().pinned_parameters.get(node.key, frozenset())
    return any(found == FLOAT and p not in variables and p not in pinned for p, found in bound.items())


def _first_opset(analysis: Analysis, node: Node) -> int:
    """First opset at which all of the node's float32 parameters may be low on the target; 0 if there is none."""
    policy, bound = analysis.policy, analysis.terms.bound[node.index]
    params = [param for param, found in bound.items() if found == FLOAT]
    assert node.signature is not None
    for signature in newer_versions(node.signature):
        low = retyped(FLOAT, policy.low)
        admitted = [param for param in params if low in signature.params.get(param, ())]
        if not admitted:
            continue
        found = freedom(policy.target, node.key, signature, bound, admitted, policy.low, node.proto)
        if len(admitted) == len(params) and not found.high:
            return signature.since
    return 0
