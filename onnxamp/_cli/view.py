"""``onnxamp view``."""

import shlex
from dataclasses import replace

from onnxamp._audit.audit import audit_model
from onnxamp._cli.common import (
    FILE,
    Given,
    check_outputs,
    new_command,
    option,
    show,
    tell,
    write_page,
)
from onnxamp._cli.options import (
    conversion_options,
    custom_arguments,
    level_option,
    library_option,
    model_argument,
    options_of,
    report_options,
)
from onnxamp._convert.misspelt import refuse_misspelt
from onnxamp._convert.plan import load_plan, strict
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError
from onnxamp._job.writing import preview
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._numerics.cure import Recipe
from onnxamp._report.conversion import preview_report
from onnxamp._report.html.page import preview_page
from onnxamp._report.machine import document

_LEVELS = ("O0", "O1", "O2", "O3")


@new_command("view")
@model_argument
@option("-o", "--output", type=FILE, help="Where to write the page [MODEL.html].")
@level_option("The level to show.", _LEVELS)
@conversion_options
@library_option
@option(
    "--plan",
    "plan_file",
    type=FILE,
    help="Show a saved plan instead, of level auto or --rescale, too.",
)
@report_options("report", "verdict")
def command(given: Given) -> None:
    """Write an HTML page of what converting MODEL would do, without running it.

    The page draws the precision of each node along the model with all Casts, lists the nodes with their reasons, and
    gives the command that converts the model so.

    Exit codes: 0 the page was written; 1 the model cannot be read or converted; 2 wrong usage.
    """
    plan = strict(load_plan(given.plan_file)) if given.plan_file else None
    asked = plan.options if plan else options_of(given)
    if asked.lacks_ranges:
        flag = "--rescale" if asked.data_max is None else "--data-max"
        raise ArgumentError(
            f"{flag} needs measured ranges: view the plan that onnxamp convert --save-plan writes."
        )
    model = given.model
    opened = Model.of(model)
    page = given.output or model.with_suffix(".html")
    if page.is_dir():
        page /= f"{model.stem}.html"
    check_outputs(given, [page], *opened.files)
    if plan is None:
        refuse_misspelt(opened, asked)
    target = model.with_name(f"{model.stem}_{low_type(asked.dtype).suffix}.onnx")
    made, result = preview(opened, target, asked, plan)
    custom = custom_arguments(given)
    if plan is not None:
        made = replace(
            made, plan=plan
        )  # its reasons are those of the conversion that was planned
        converts = shlex.join(
            [
                "onnxamp",
                "convert",
                str(model),
                "-o",
                str(target),
                "--plan",
                str(given.plan_file),
                *custom,
            ]
        )
    else:
        converts = Recipe(asked, sampling=custom).command(str(model), str(target), ())
    audit = audit_model(result, asked.target, base_dir=opened.folder)
    confirm_sources()
    write_page(preview_page(made, audit, converts), page)
    tell(made.plan.warnings if plan is None else ())
    show(
        given,
        lambda: preview_report(made, audit, converts)._replace(
            models=(str(model), str(page))
        ),
        lambda: document(
            "view", {"page": page, "plan": made.plan, "summary": made.summary}
        ),
    )
