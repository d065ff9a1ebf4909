"""``onnxamp inspect``."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from onnxamp._cli.common import errors_end_here
from onnxamp._cli.options import conversion_options, options_of
from onnxamp._convert.analysis import analyse
from onnxamp._convert.hints import fold_hint
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._convert.summary import summarize
from onnxamp._errors import OpsetError
from onnxamp._graph.stats import operator_counts
from onnxamp._model.model import Model
from onnxamp._report.inspect import inspection_report
from onnxamp._report.machine import document
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._rewrite.prepare import prepare

_LEVELS = ("O1", "O2", "O3")


@click.command("inspect")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--level", "levels", type=click.Choice(_LEVELS), multiple=True, help="Levels to show [all]. Repeatable.")
@conversion_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Print every verdict; show tracebacks.")
def command(model: Path, **options: Any) -> None:
    """Show what is in MODEL, and what each level would do and why. Nothing is written."""
    with errors_end_here(verbose=options["verbose"]):
        _inspect(model, options)


def _inspect(path: Path, options: dict[str, Any]) -> None:
    model = Model.read(path)
    plans: dict[str, tuple[Plan, dict[str, int]]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    hints: dict[str, str | None] = {}
    wanted = options["levels"] or _LEVELS
    steps = ("O0", *wanted)
    for level in _told(steps):
        asked = options_of(options, level)
        try:
            analysis = analyse(prepare(model, asked).graph, asked)
        except OpsetError:
            if level == "O0":
                raise
            continue
        if level == "O0":
            counts = operator_counts(analysis.graph, analysis.graph.types)
        else:
            plans[level] = (make_plan(analysis), dict(summarize(analysis).nodes))
            hints[level] = fold_hint(analysis)
    if options["as_json"]:
        levels = {level: plan for level, (plan, _) in plans.items()}
        facts = {"operators": counts, "levels": levels, "hints": {level: hint for level, hint in hints.items() if hint}}
        click.echo(document("inspect", facts))
        return
    report = inspection_report(path, model.proto, counts, plans, hints, with_decisions=bool(options["levels"]))
    print_report(report, verbose=options["verbose"])


def _told(levels: Sequence[str]) -> Iterator[str]:
    """The levels; on a terminal it is seen how far they are."""
    with progress_bar() as told:
        for number, level in enumerate(levels):
            told("analysing", number, len(levels))
            yield level
