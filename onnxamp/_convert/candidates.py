"""The ways to convert a model: at which opset, and with which patterns folded into single ops.

Patterns that are float32 in any case as they are become units of the problem (:mod:`onnxamp._convert.units`), and one
cut decides which of them are low: only these are folded. A newer opset is tried where the model's own holds nodes back
(:mod:`onnxamp._convert.upgrades`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnxamp._convert.analysis import Analysis, Decided, analyze
from onnxamp._convert.estimate import time_on_target
from onnxamp._convert.plan import Plan
from onnxamp._convert.raising import start_raised
from onnxamp._convert.units import find_units, lowered, unfolded_in_float32
from onnxamp._convert.upgrades import Upgrades, refusal_at
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._rewrite.passes.fold import output_of
from onnxamp._rewrite.passes.fold_search import Fold
from onnxamp._rewrite.prepare import Prepared, Start


def candidates(
    model: Model, options: Options, plan: Plan | None = None
) -> Iterator[Decided]:
    """Yield the ways to convert a model, the best first.

    One whose float32 model must be proven to compute the same (:attr:`Decided.refusal`) is followed by the next best.

    Args:
        model: the model.
        options: the options of the conversion.
        plan: decisions to repeat, at the opset that they were made for.

    Raises:
        OpsetError: an opset that was requested, or that the low-precision type needs, cannot be reached. Others as
            :func:`onnxamp._rewrite.prepare.start` and :func:`onnxamp._convert.analysis.analyze`.
    """
    begun = start_raised(model, options)
    if plan is not None:
        planned = _as_planned(begun.prepared(options), options, plan)
        yield Decided(planned, analyze(planned.graph, options, plan.of_nodes()))
        return
    at_opsets = _at_opsets(begun, options)
    units = find_units(begun, options)
    if units:
        outputs = tuple(output_of(begun.graph, unit) for unit in units)
        asked = replace(options, folded=outputs)
        yield from _folded(begun, next(_at_opsets(begun, asked, units)), None)
    else:
        first = next(at_opsets)
        yield from _folded(begun, first, first.analysis)
        yield first
    yield from at_opsets


def _folded(
    begun: Start, first: Decided, unfolded: Analysis | None
) -> Iterator[Decided]:
    """Yield the model with only those patterns folded that become low by it, if there are any and that pays.

    Arguments are those of :func:`_only_lowered` and :func:`_gain`.
    """
    best = _only_lowered(begun, first)
    gain = "" if best is None else _gain(best.analysis, unfolded)
    if best is not None and gain:
        yield best.told(gain)


def _only_lowered(begun: Start, first: Decided) -> Decided | None:
    """Return the model with only those patterns folded that become low by it; None if there are none.

    Args:
        begun: the model before folds.
        first: the model with its units folded. Patterns that stay in float32 beside them are tried as well.
    """
    folded = first
    options = first.analysis.options
    more = unfolded_in_float32(first.analysis)
    if more:
        asked = replace(options, folded=(*options.folded, *more))
        folded = next(_at_opsets(begun, asked))
    low = lowered(folded.analysis)
    if not low:
        return None
    if len(low) < len(folded.analysis.options.folded):
        folded = next(_at_opsets(begun, replace(options, folded=low)))
    return replace(folded, refusal="Not folded into single ops:")


def _at_opsets(
    begun: Start, options: Options, folds: Sequence[Fold] | None = None
) -> Iterator[Decided]:
    """Yield the model at newer opsets that are worth it, the best first, and finally at the lowest possible one."""
    original = begun.prepared(options, folds)
    upgrades = Upgrades(original)
    least = upgrades.at_least(options)
    own = Decided(
        prepared=least,
        analysis=analyze(least.graph, options),
        refusal="" if least is original else refusal_at(options.low.min_opset),
    )
    yield from upgrades.paying(own)


def _as_planned(prepared: Prepared, options: Options, plan: Plan) -> Prepared:
    """Return the model at the opset of a plan, unless the user requested another."""
    upgrades = Upgrades(prepared)
    if not options.may_upgrade or plan.opset <= upgrades.current:
        return prepared
    planned = upgrades.at(plan.opset)
    note = f"Upgraded from opset {upgrades.current} to {plan.opset}, as the plan says."
    return replace(planned, notes=(*planned.notes, note))


def _gain(folded: Analysis, unfolded: Analysis | None) -> str:
    """Return a sentence about the benefit of folds; "" if there is none.

    Args:
        folded: the model with folds.
        unfolded: the model without them; None if all are of units. Those are float32 as nodes, so the cut, which might
            have left them in float32 as well, found that to be dearer.
    """
    gain = "makes the result faster"
    if unfolded is not None:
        if time_on_target(folded) >= time_on_target(unfolded):
            return ""
        saved = unfolded.casts - folded.casts
        if saved > 0:
            gain = f"saves {saved} of {unfolded.casts} new Casts"
    return f"Folding {gain}; --no-fold leaves the patterns as they are."
