"""``onnxamp inspect``."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from onnxamp._base.errors import OpsetError
from onnxamp._cli.common import (
    Given,
    in_its_folder,
    options_of,
    show,
    tell,
    typed_flags,
)
from onnxamp._convert.analysis import Decided
from onnxamp._convert.cast_trace import CastTrace, trace_casts
from onnxamp._convert.causes import cost_sentences
from onnxamp._convert.convert import decide
from onnxamp._convert.hints import batch_norm_hint, fold_hint, opset_hint
from onnxamp._convert.misspelled import refuse_misspelled
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._convert.summary import summarize
from onnxamp._graph.types import operator_counts
from onnxamp._job.expecting import foreseen
from onnxamp._job.headroom import headroom_of
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._numerics.unseen.stressed import Room
from onnxamp._report.casts import casts_report
from onnxamp._report.inspect import inspection_report
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.run import RunOptions

if TYPE_CHECKING:
    from onnxamp._tuning.errors.foreseen import Known

Counts: TypeAlias = Counter[tuple[str, str]]
"""Nodes by op type and precision."""

Planned: TypeAlias = tuple[Plan, dict[str, int]]
"""A plan, and nodes by precision."""

_LEVELS: Final = ("O1", "O2", "O3")
_USUAL: Final = "O2"
"""The level at which Casts are explained if none is given: that of ``onnxamp convert``."""

_LARGE: Final = 512 << 20
"""Bytes of weights beyond which bounds are computed only if samples or ranges are given: they take a second."""


def run(given: Given) -> None:
    """Run ``onnxamp inspect``."""
    opened = Model.of(given.model)
    if given.cast:
        if unused := typed_flags("Inputs and runs"):
            raise click.UsageError(
                f"--cast runs nothing, so {', '.join(unused)} would have no effect: drop one or the other."
            )
        _explain_casts(given, opened)
        return
    levels = given.levels or _LEVELS
    counts, plans, hints = _inspected(given, opened, levels)
    asked = in_its_folder(given, options_of(given, levels[-1]), opened, previews=True)
    rooms = tuple[Room, ...]()
    if given.inputs or asked.input_ranges or opened.stock.size <= _LARGE:
        rooms = headroom_of(opened, asked, RunOptions(samples=given.inputs))
    confirm_sources()
    warnings = chain.from_iterable(plan.warnings for plan, _ in plans.values())
    tell(dict.fromkeys(warnings))  # most levels have the same ones
    show(
        given,
        partial(
            inspection_report,
            given.model,
            opened.proto,
            counts,
            plans,
            hints,
            rooms=rooms,
            dtype=asked.dtype,
            with_decisions=bool(given.levels),
        ),
        "inspect",
        lambda: {
            "operators": counts,
            "levels": {level: plan for level, (plan, _) in plans.items()},
            "hints": {level: hint for level, hint in hints.items() if hint},
            "headroom": rooms,
        },
    )


def _inspected(
    given: Given, opened: Model, levels: Sequence[str]
) -> tuple[Counts, dict[str, Planned], dict[str, str | None]]:
    """Return the ops of a model and, for each level, its plan with counts of nodes, and hints.

    A level that the opset of the model is too old for is left out, and the report says so.
    """
    counts: Counts = Counter()
    plans = dict[str, Planned]()
    hints = dict[str, str | None]()
    known: Known = {}  # levels share it, as most prepare the same model
    # Level O0 prepares the model and lowers nothing: it shows what is in the model.
    levels = ("O0", *levels)
    with progress_bar() as progress:
        for number, level in enumerate(levels):
            progress("analysing", number, len(levels))
            try:
                decided = _decided(given, opened, level)
            except OpsetError:
                if level == "O0":
                    raise
                continue
            if level == "O0":
                graph = decided.analysis.graph
                counts = operator_counts(graph, graph.types)
                continue
            plan = make_plan(decided.analysis)
            if given.expected_error or given.inputs:
                inputs = RunOptions(samples=given.inputs)
                plan = foreseen(opened, plan, inputs, known)
            summary = summarize(decided.prepared, decided.analysis)
            plans[level] = plan, dict(summary.nodes)
            hints[level] = _hints(decided)
    return counts, plans, hints


def _decided(given: Given, opened: Model, level: str) -> Decided:
    """Return the decision on a model at a level.

    Raises:
        ArgumentError: the model lacks a name that an option gives. OpsetError: its opset is too old.
    """
    asked = in_its_folder(given, options_of(given, level), opened, previews=True)
    refuse_misspelled(opened, asked)
    return decide(opened, asked)


def _hints(decided: Decided) -> str:
    """Return sentences about what happened to the model, and about options that would lower more."""
    ready = decided.prepared
    analysis = decided.analysis
    sentences = (
        *ready.notes,
        *ready.unfolded,
        *ready.refused,
        opset_hint(analysis),
        fold_hint(analysis),
        batch_norm_hint(analysis),
        *cost_sentences(analysis),
    )
    return " ".join(filter(None, sentences))


def _explain_casts(given: Given, opened: Model) -> None:
    """Show why the Casts of some values are where they are, at each requested level."""
    traces = list[tuple[str, CastTrace]]()
    for level in given.levels or (_USUAL,):
        analysis = _decided(given, opened, level).analysis
        for trace in trace_casts(opened, analysis, given.cast):
            traces.append((str(level), trace))
    confirm_sources()
    show(
        given,
        partial(casts_report, str(given.model), traces),
        "inspect",
        lambda: {
            "casts": [{"level": level, "trace": trace} for level, trace in traces]
        },
    )
