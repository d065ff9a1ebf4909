"""What folding would save, for models that are not folded: computed, never guessed."""

from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis, analyse
from onnxamp._decide.policy import Level
from onnxamp._dtypes import FLOAT, LOW_TYPES
from onnxamp._errors import OnnxAmpError
from onnxamp._graph.view import ABSENT
from onnxamp._model.storage import weight_bytes
from onnxamp._patterns.match import Reading
from onnxamp._rewrite.fold.apply import apply_folds
from onnxamp._rewrite.fold.fold import reachable, told
from onnxamp._rewrite.fold.folds import Fold
from onnxamp._rewrite.fold.search import find_folds

_COUNTED: Final = 1 << 29
"""Bytes of weights up to which a copy of the model is folded and analysed to count its Casts."""
_FEW: Final = 10_000
"""Nodes up to which that is done: a second analysis takes as long as the first."""
_FLOATS: Final = frozenset({FLOAT, *(low.tensor for low in LOW_TYPES.values())})


def fold_hint(model: ModelProto, analysis: Analysis, base_dir: Path | None) -> str | None:
    """What is written out in the model, and how many Casts fewer there would be with it folded; None where nothing is.

    Args:
        model: the one that was analysed. A copy is folded and analysed where its weights are not too large for that.
    """
    policy = analysis.policy
    if policy.fold or policy.level == Level.O0:
        return None
    reading = Reading(analysis.view, analysis.types, analysis.shapes, base_dir)
    folds = find_folds(reading, with_weights=False)
    opset = reachable(reading, folds, policy.target, None)
    folds = [fold for fold in folds if fold.opset <= opset]
    if not folds:
        return None
    text = f"{_are(folds)} written out as single ops; --fold makes one op of each"
    casts, folded = _casts(analysis), _casts_folded(model, analysis, folds, opset, base_dir)
    if folded is not None and folded < casts:
        text = f"{text}, and saves {casts - folded} of {casts} Casts"
    if policy.level in (Level.O1, Level.O2) and any(fold.op in policy.black for fold in folds):
        text = f"{text}. With --lists fast normalisations may then be low, too"
    return f"{text}."


def _are(folds: list[Fold]) -> str:
    return f"{told(folds)} {'is' if len(folds) == 1 else 'are'}"


def _casts(analysis: Analysis) -> int:
    """Casts of the result."""
    there = sum(node.key == "Cast" for node in analysis.view.nodes)
    return there + len(analysis.edits.casts) - len(analysis.edits.removed)


def _casts_folded(
    model: ModelProto, analysis: Analysis, folds: list[Fold], opset: int, base_dir: Path | None
) -> int | None:
    """The same, folded and seen as if the model had the opset; None where that would cost too much."""
    if len(analysis.view.nodes) > _FEW or weight_bytes(model) > _COUNTED:
        return None
    copy = ModelProto()
    copy.CopyFrom(model)
    apply_folds(analysis.view, folds, copy)
    opsets = {**analysis.view.book.opsets, "": opset}
    try:
        return _casts(analyse(copy, analysis.policy, base_dir=base_dir, opsets=opsets))
    except OnnxAmpError:
        return None


def written_out(reading: Reading) -> str | None:
    """What is written out in a model that is perhaps low already, and how many Casts between floats stand around it."""
    folds = find_folds(reading, with_weights=False)
    if not folds:
        return None
    casts = set().union(*(_casts_around(reading, fold) for fold in folds))
    around = f", with {len(casts)} Cast{'' if len(casts) == 1 else 's'} around" if casts else ""
    return f"{_are(folds)} written out as single ops{around}"


def _casts_around(reading: Reading, fold: Fold) -> set[int]:
    """Casts between floats among the nodes, right before and right behind them."""
    view, found = reading.view, set[int]()
    read = {reading.passed_on(value) for index in fold.nodes for value in view.nodes[index].inputs if value != ABSENT}
    before = map(view.producer, read)
    behind = (node for value in view.nodes[fold.last].outputs for node, _ in view.consumers(value))
    for node in (*map(view.nodes.__getitem__, fold.nodes), *before, *behind):
        if node is not None and node.key == "Cast":
            ends = reading.types[node.inputs[0]], reading.types[node.outputs[0]]
            if ends[0] != ends[1] and _FLOATS.issuperset(ends):
                found.add(node.index)
    return found
