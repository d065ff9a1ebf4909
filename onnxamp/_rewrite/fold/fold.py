"""Folding a whole model: which folds there are, the opset that they need, and the model with them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._decide.policy import Policy
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._errors import OpsetError
from onnxamp._ops.signature import lookup
from onnxamp._patterns.forms import fold_facts
from onnxamp._patterns.match import Reading
from onnxamp._rewrite.fold.apply import apply_folds
from onnxamp._rewrite.fold.folds import Fold
from onnxamp._rewrite.fold.search import find_folds, read_model
from onnxamp._rewrite.opset import upgrade
from onnxamp._target.kernels import kernel_table

_FLOATS: Final = frozenset({FLOAT, *(low.tensor for low in LOW_TYPES.values())})


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded model, and a sentence for each thing that was done or could not be done."""

    model: ModelProto
    notes: tuple[str, ...]


def fold_model(
    model: ModelProto, policy: Policy, *, base_dir: Path | None = None, ceiling: int | None = None
) -> Folded:
    """Rewrite what is written out into standard ops; the same model object where there is nothing to rewrite.

    Args:
        base_dir: folder of the model's external data.
        ceiling: the newest opset that the model may be upgraded to, where that is limited.

    Raises:
        ModelError: the model breaks a rule of ONNX.
    """
    reading = read_model(model, base_dir, freeze_defaults=policy.freeze_defaults)
    found = find_folds(reading, with_weights=False)
    current, notes = reading.view.book.opsets[""], list[str]()
    wanted = reachable(reading, found, policy.target, ceiling)
    if wanted > current:
        try:
            model = upgrade(model, wanted, [])
            reading = read_model(model, base_dir, freeze_defaults=policy.freeze_defaults)
            needed = told([fold for fold in found if current < fold.opset <= wanted])
            notes.append(f"Upgraded from opset {current} to {wanted}, for the sake of {needed}.")
        except OpsetError as error:
            notes.append(str(error))
    folds = find_folds(reading)
    reached = reading.view.book.opsets[""]
    ready = [fold for fold in folds if fold.opset <= reached]
    late = [fold for fold in folds if fold.opset > reached]
    if late:
        notes.append(_why_late(reading, late, policy.target, ceiling))
    if not ready:
        return Folded(model, tuple(notes))
    result = ModelProto()
    result.CopyFrom(model)
    apply_folds(reading.view, ready, result)
    return Folded(result, (*notes, f"Folded {told(ready)}."))


def reachable(reading: Reading, folds: Sequence[Fold], target: str, ceiling: int | None) -> int:
    """The newest opset that folds want and at which no other node loses a kernel on the target."""
    current = reading.view.book.opsets[""]
    opsets = sorted({fold.opset for fold in folds if current < fold.opset <= (ceiling or fold.opset)}, reverse=True)
    return next((opset for opset in opsets if not _losers(reading, folds, target, opset)), current)


def _losers(reading: Reading, folds: Sequence[Fold], target: str, opset: int) -> list[str]:
    """Op types outside the folds with fewer kernels on the target at that opset than now."""
    if target == "any":
        return []
    going = {node for fold in folds for node in fold.nodes}
    staying = {node.key: node.signature for node in reading.view.nodes if node.index not in going}
    found = []
    for key, signature in staying.items():
        newer = lookup("", key, opset) if signature is not None and not signature.domain else None
        if signature is not None and newer is not None and newer is not signature:
            lost = _float_types(target, key, signature.since) - _float_types(target, key, newer.since)
            found += [key] if lost else []
    return sorted(found)


def _float_types(target: str, key: str, since: int) -> set[str]:
    """Float types that kernels of this version of the op take anywhere."""
    rows = (row for row in kernel_table(target).get(key, ()) if row.covers(since))
    return {name for row in rows for names in row.types.values() for name in names if name in _FLOATS}


def _why_late(reading: Reading, late: Sequence[Fold], target: str, ceiling: int | None) -> str:
    """Why folds have to be left."""
    opset = min(fold.opset for fold in late)
    text = f"{told(late)} {'stays' if len(late) == 1 else 'stay'} written out: that takes opset {opset}"
    if ceiling is not None and opset > ceiling:
        return f"{text}, and --opset {ceiling} is asked for."
    losers = _losers(reading, late, target, opset)
    return f"{text}, where {', '.join(losers)} would lose kernels on {target}." if losers else f"{text}."


def told(folds: Sequence[Fold]) -> str:
    """How many of each kind: "12 LayerNorms and 24 Gelus"."""
    counts = Counter(
        fold_facts().kinds[fold.kind].called if fold.kind in fold_facts().kinds else fold.kind for fold in folds
    )
    parts = [f"{n} {kind}{'' if n == 1 else 'es' if kind.endswith('x') else 's'}" for kind, n in counts.items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
