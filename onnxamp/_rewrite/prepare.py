"""What happens to a model before it is analysed: functions inlined; opset, defaults and folds on request."""

from pathlib import Path
from typing import NamedTuple

import onnx.inliner
from onnx import ModelProto

from onnxamp._decide.policy import Level, Policy
from onnxamp._rewrite.fold import fold_model
from onnxamp._rewrite.opset import upgrade


class Prepared(NamedTuple):
    """The model that is to be analysed, and a sentence for each thing that was done to it.

    ``wanted``: whether it is what the user asked for even if nothing becomes low, as it was upgraded or folded.
    """

    model: ModelProto
    notes: list[str]
    wanted: bool


def prepare(model: ModelProto, policy: Policy, opset: int | None, base_dir: Path | None = None) -> Prepared:
    """Make a model ready; the same object is returned where nothing had to be done, and the input is never changed.

    Args:
        opset: upgrade to this one; folds go no further then.
        base_dir: folder of the model's external data, None where all weights are inline.

    Raises:
        OpsetError: the model cannot be brought to the wanted opset. ModelError: it cannot be folded, as it is broken.
    """
    notes: list[str] = []
    if model.functions and not policy.keep_functions and policy.level != Level.O0:
        model = inline(model, notes)
    inlined = model
    if opset is not None:
        model = upgrade(model, opset, notes)
    wanted = model is not inlined
    if policy.freeze_defaults and model.ir_version >= 4:
        model = _freeze(model, notes)
    if policy.fold:
        folded = fold_model(model, policy, base_dir=base_dir, ceiling=opset)
        wanted, model = wanted or folded.model is not model, folded.model
        notes += folded.notes
    return Prepared(model, notes, wanted)


def inline(model: ModelProto, notes: list[str]) -> ModelProto:
    """The model with its local functions inlined, where that can be done; a sentence about it goes to ``notes``."""
    names = ", ".join(sorted(function.name for function in model.functions)[:5])
    try:
        result = onnx.inliner.inline_local_functions(model, convert_version=True)
    except Exception:  # noqa: BLE001 - untyped C++ errors; calls then stay as they are, in float32
        notes.append(f"The functions ({names}) could not be inlined; their calls stay float32.")
        return model
    notes.append(f"Inlined {len(model.functions)} model-local function(s): {names}.")
    return result


def _freeze(model: ModelProto, notes: list[str]) -> ModelProto:
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [entry for entry in model.graph.input if entry.name not in weights]
    frozen = len(model.graph.input) - len(kept)
    if not frozen:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.input[:]
    result.graph.input.extend(kept)
    notes.append(f"Froze {frozen} initializer(s) that were graph inputs, too.")
    return result
