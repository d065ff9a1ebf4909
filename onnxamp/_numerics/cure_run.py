"""The next action after a check of a model alone, whose original is not at hand, tried before it is suggested.

The nodes around faults are left unrounded in its emulation. On an engine that computes low precision itself, the model
is raised to float32 and converted again, for that engine.
"""

import re
import shlex
from dataclasses import replace
from time import monotonic
from typing import Final

from onnxamp._convert.convert import convert
from onnxamp._dtypes import FORMATS
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.check import Check
from onnxamp._numerics.cure import MOST_NODES, TRIALS, OutOfTime, Trial, node_count, stopping
from onnxamp._numerics.results import Cure, RunCheck
from onnxamp._ops.profiles import profile_of
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run

CHECKS: Final = 24
"""Emulated runs that are tried for a model alone."""


def cure_run(model: ModelSource, report: RunCheck, trial: Trial) -> Cure | None:
    """Find nodes that must stay float32 for a checked model to run without faults.

    Args:
        model: the model that was checked.
        report: what the check found.
        trial: how it was checked; its limits are not used.

    Returns:
        The options, or how far the trials came; None if no low-precision value is at fault: the float32 model fails.
    """
    if not trial.run.engine.is_reference:
        return _cure_seen(Model.of(model), report, trial)
    nodes: dict[str, None] = {}
    checked, trials, until = report, 0, monotonic() + trial.seconds
    while checked.first_bad is not None and trials < CHECKS and len(nodes) <= MOST_NODES:
        around = _around_faults(checked)
        if not around:
            return None
        if not around.keys() - nodes.keys():
            break
        nodes |= around
        trials += 1
        trial.run.report(trial.activity, trials, CHECKS)
        try:
            checked = Check(Model.of(model), _hurried(trial, until), keep=frozenset(nodes)).report()
        except OutOfTime:
            break
    if checked.first_bad is not None or checked.skipped is not None:
        when = f" in {trial.seconds:.0f} s" if monotonic() > until else ""
        text = (
            f"No cure was found{when}: trials with up to {node_count(nodes)} in float32 fail, too."
        )
        return Cure("", tuple(nodes), text, confirmed=False, trials=trials)
    names = "|".join(map(re.escape, nodes))
    text = f"Tried: no fault is left with {node_count(nodes)} in float32. Convert the original again with"
    return Cure(
        f"--keep-fp32 {shlex.quote(names)}", tuple(nodes), text, confirmed=True, trials=trials
    )


def _hurried(trial: Trial, until: float) -> Run:
    """Return the run of a trial in this process alone, which ends at a time."""
    return replace(trial.run, workers=None, state=None, report=stopping(until))


def _around_faults(checked: RunCheck) -> dict[str, None]:
    """The low-precision nodes that go wrong, and those that read what they make."""
    faults = [row for row in checked.values if row.fault and row.dtype in FORMATS]
    return dict.fromkeys(name for row in faults for name in (row.node, *row.readers))


def _cure_seen(model: Model, report: RunCheck, trial: Trial) -> Cure | None:
    """:func:`cure_run` on an engine: the model is converted again as far as its kernels and its arithmetic allow, then
    with more and more nodes in float32, and each result is checked there.
    """
    known = profile_of(trial.run.engine.provider)
    target = known.name if known is not None else "any"
    nodes: dict[str, None] = {}
    checked, trials, until = report, 0, monotonic() + trial.seconds
    while True:
        around = _around_faults(checked)
        if not around:
            return None
        if trials and not around.keys() - nodes.keys():
            break
        if trials or known is None:
            nodes |= around
        trials += 1
        trial.run.report(trial.activity, trials, TRIALS)
        kept = tuple(map(re.escape, nodes))
        try:
            result = convert(
                model, Options(Level.O3, from_dtype="auto", target=target, keep_high=kept)
            ).embedded()
            checked = Check(Model(result), _hurried(trial, until)).report()
        except OutOfTime:
            break
        except (
            OnnxAmpError
        ):  # it cannot be raised to float32, or contradicts itself with these nodes
            return None
        if (
            checked.first_bad is None
            or trials == TRIALS
            or len(nodes) > MOST_NODES
            or monotonic() > until
        ):
            break
    if checked.first_bad is not None or checked.skipped is not None:
        when = f" in {trial.seconds:.0f} s" if monotonic() > until else ""
        text = f"No cure was found{when}: conversions with up to {node_count(nodes)} in float32 fail there, too."
        return Cure("", tuple(nodes), text, confirmed=False, trials=trials)
    options = [f"--target {target}"] if known is not None else []
    options += [f"--keep-fp32 {shlex.quote('|'.join(map(re.escape, nodes)))}"] if nodes else []
    what = f"converted for {target}" if known is not None else "converted again"
    if nodes:
        what += f" with {node_count(nodes)} in float32"
    text = f"Tried: {what}, it has no fault there. Convert the original with"
    return Cure(" ".join(options), tuple(nodes), text, confirmed=True, trials=trials)
