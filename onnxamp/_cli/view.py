"""``onnxamp view``."""

import shlex
from dataclasses import replace

from onnxamp._audit.audit import audit_model
from onnxamp._base.errors import ArgumentError
from onnxamp._cli.common import (
    Given,
    custom_arguments,
    in_its_folder,
    options_of,
    overridden_by_plan,
    show,
    tell,
)
from onnxamp._cli.outputs import check_outputs, file_of
from onnxamp._convert.misspelled import refuse_misspelled
from onnxamp._convert.plan import load_plan, strict
from onnxamp._facts.dtypes import low_type
from onnxamp._job.expecting import foreseen
from onnxamp._job.writing import preview
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._report.conversion import preview_report
from onnxamp._report.html import preview_page
from onnxamp._report.html.render import write_page
from onnxamp._report.parts import Report
from onnxamp._runtime.run import RunOptions
from onnxamp._tuning.cure import Recipe


def run(given: Given) -> None:
    """Run ``onnxamp view``."""
    plan = strict(load_plan(given.plan_file)) if given.plan_file else None
    asked = plan.options if plan else options_of(given)
    if asked.lacks_ranges:
        flag = "--rescale" if asked.data_max is None else "--data-max"
        raise ArgumentError(
            f"{flag} needs measured ranges: view the plan that onnxamp convert --save-plan writes."
        )
    model = given.model
    opened = Model.of(model)
    if plan is None:
        asked = in_its_folder(given, asked, opened, previews=True)
    page = model.with_suffix(".html")
    if given.output is not None:
        page = file_of(given.output, page.name)
    check_outputs(given, [page], *opened.files)
    if plan is None:
        refuse_misspelled(opened, asked)
    else:
        tell(overridden_by_plan())
    target = model.with_name(f"{model.stem}_{low_type(asked.dtype).suffix}.onnx")
    conversion, result = preview(opened, target, asked, plan)
    custom = custom_arguments(given)
    if plan is None:
        command = Recipe(asked, sampling=custom).command(str(model), str(target), ())
    else:
        # The reasons in the saved plan may be measured ones, which a preview cannot know.
        conversion = replace(conversion, plan=plan)
        files = (str(model), "-o", str(target), "--plan", str(given.plan_file))
        command = shlex.join(["onnxamp", "convert", *files, *custom])
    if given.expected_error or given.inputs:
        inputs = RunOptions(samples=given.inputs)
        plan_with_error = foreseen(opened, conversion.plan, inputs)
        conversion = replace(conversion, plan=plan_with_error)
    audit = audit_model(result, asked.target, base_dir=opened.folder)
    confirm_sources()
    write_page(preview_page(conversion, audit, command), page)
    tell(conversion.plan.warnings if plan is None else ())

    def report() -> Report:
        preview = preview_report(conversion, audit, command)
        return preview._replace(models=(str(model), str(page)))

    facts = {"plan": conversion.plan, "summary": conversion.summary}
    show(given, report, "view", lambda: {"page": page, **facts})
