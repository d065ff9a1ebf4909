"""The next action: options that make a failure go away, tried before they are told.

For a comparison, the original is converted again with more and more nodes kept in float32, those that are broken first,
then those with the largest local error, and each candidate is compared as the failing result was. For a model alone,
whose original is not at hand, the same nodes are left unrounded in its emulation.
"""

import re
import shlex
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Final

from onnxamp._convert.convert import convert
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.check import check_run
from onnxamp._numerics.diff import diff_models
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.results import Cure, DiffReport, LayerDiff, RunCheck
from onnxamp._options.options import Options
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.side import BUDGET

_FEW: Final = 4
_MANY: Final = 64
"""Nodes that a command may name: three quarters of those that are rounded, within these bounds."""

TRIALS: Final = 12
"""Conversions that are tried for a comparison."""

_ROUNDED: Final = 1e-6
"""Local relative error from which on a node has been rounded: float32 alone stays below."""

CHECKS: Final = 24
"""Emulated runs that are tried for a model alone."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A conversion; ``sampling`` are options of the command line that make it run on the same inputs."""

    options: Options = field(default_factory=Options)
    sampling: tuple[str, ...] = ()

    def keeping(self, nodes: Sequence[str]) -> Options:
        """The options with these nodes kept in float32, too."""
        return replace(self.options, keep_high=(*self.options.keep_high, *map(re.escape, nodes)))

    def command(self, source: str, target: str, nodes: Sequence[str]) -> str:
        """The command that converts so, with these nodes kept in float32."""
        keep = ["--keep-fp32", "|".join(map(re.escape, nodes))] if nodes else []
        options = ["--level", str(self.options.level), *self.options.written(), *self.sampling]
        return shlex.join(["onnxamp", "convert", source, "-o", target, *options, *keep])


@dataclass(frozen=True, slots=True)
class Trial:
    """How candidates are compared: as the comparison that failed was."""

    samples: Samples
    limits: Limits = field(default_factory=Limits)
    provider: Provider | None = None
    budget: int = BUDGET
    told: Callable[[int, int], None] | None = None


def cure_conversion(
    original: ModelSource, command: tuple[str, str], recipe: Recipe, trial: Trial, *, tried: bool
) -> Cure:
    """Find nodes to keep in float32 so that a conversion holds its limits.

    Args:
        original: the float32 model.
        command: how the command that is told names the model and its result.
        recipe: the conversion to start from.
        trial: how candidates are compared.
        tried: whether the recipe as it is was what failed.

    Returns:
        The command that was seen to hold, or how far the trials came.
    """
    search = _Search(original, recipe, trial)
    nodes: tuple[str, ...] = ()
    found = search.compare(nodes, layers=True)
    rounded = _rounded(found.layers) if found is not None else 0
    step = 1
    while found is not None and not found.passed and search.trials < TRIALS:
        more = _suspects(found.layers, set(nodes), step)
        most = max(_FEW, min(_MANY, rounded * 3 // 4))
        if not more or len(nodes) >= most:
            break
        nodes, step = (*nodes, *more)[:most], step * 2
        found = search.compare(nodes, layers=True)
    if found is None or not found.passed:
        kept = f" with up to {_nodes(nodes)} in float32" if nodes else ""
        text = f"No cure was found: trials{kept} miss the limits, too. Level O1, bfloat16 or wider limits may do."
        return Cure("", nodes, text, confirmed=False, trials=search.trials)
    nodes = search.fewer(nodes)
    worst = max((diff.rel_l2 for diff in found.outputs if diff.is_float), default=0.0)
    if not nodes and not tried:
        text = f"Tried: a conversion with onnxamp's lists and hazards holds (relative L2 {worst:.1e})."
    else:
        text = f"Tried: with {_nodes(nodes)} more in float32 the conversion holds (relative L2 {worst:.1e})."
    return Cure(recipe.command(*command, nodes), nodes, text, confirmed=True, trials=search.trials)


@dataclass(slots=True)
class _Search:
    original: ModelSource
    recipe: Recipe
    trial: Trial
    trials: int = 0

    def compare(self, nodes: Sequence[str], *, layers: bool) -> DiffReport | None:
        """Convert with these nodes in float32, and compare; None if it cannot be converted so."""
        self.trials += 1
        trial = self.trial
        if trial.told is not None:
            trial.told(self.trials, TRIALS)
        try:
            model = convert(Model.of(self.original), self.recipe.keeping(nodes)).embedded()
        except OnnxAmpError:  # the wishes contradict each other with these nodes
            return None
        return diff_models(
            self.original, model, trial.samples, limits=trial.limits, layers=layers, provider=trial.provider,
            budget=trial.budget,
        )  # fmt: skip

    def fewer(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Drop halves of what is left as long as the rest is enough."""
        size = len(nodes) // 2
        while size and self.trials < TRIALS + 4:
            for start in range(0, len(nodes), size):
                rest = nodes[:start] + nodes[start + size :]
                found = self.compare(rest, layers=False)
                if found is not None and found.passed:
                    nodes = rest
                    break
                if self.trials >= TRIALS + 4:
                    return nodes
            size = min(size // 2, len(nodes) // 2)
        return nodes


def _nodes(nodes: Sized) -> str:
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"


def _rounded(rows: Sequence[LayerDiff]) -> int:
    return sum(row.local is not None and row.local.rel_l2 > _ROUNDED for row in rows)


def _suspects(rows: Sequence[LayerDiff], kept: set[str], count: int) -> list[str]:
    """The nodes to keep next: those that break on the reference's own values; else those with the largest error."""
    low = [row for row in rows if row.local is not None and row.node not in kept and row.local.rel_l2 > _ROUNDED]
    broken = [row.node for row in low if row.local is not None and row.local.alarm]
    if broken:
        return list(dict.fromkeys(broken))
    ranked = sorted(low, key=lambda row: row.local.rel_l2 if row.local else 0.0, reverse=True)
    return list(dict.fromkeys(row.node for row in ranked[:count] if row.local and row.local.rel_l2 > 0))


def cure_run(model: ModelSource, report: RunCheck, trial: Trial) -> Cure | None:
    """Find nodes that must stay float32 for a checked model to run without faults.

    Args:
        model: the model that was checked.
        report: what the check found.
        trial: how it was checked; limits do not count.

    Returns:
        None where the model has nothing low at fault: then it is the float32 model that fails.
    """
    nodes: dict[str, None] = {}
    found, trials = report, 0
    while found.first_bad is not None and trials < CHECKS and len(nodes) <= _MANY:
        faults = [row for row in found.values if row.fault and row.dtype in ("float16", "bfloat16")]
        if not faults:
            return None
        around = dict.fromkeys(name for row in faults for name in (row.node, *row.readers))
        if not around.keys() - nodes.keys():
            break
        nodes |= around
        trials += 1
        if trial.told is not None:
            trial.told(trials, CHECKS)
        found = check_run(model, trial.samples, provider=trial.provider, budget=trial.budget, keep=frozenset(nodes))
    if found.first_bad is not None or found.skipped is not None:
        text = f"No cure was found: trials with up to {_nodes(nodes)} in float32 fail, too."
        return Cure("", tuple(nodes), text, confirmed=False, trials=trials)
    names = "|".join(map(re.escape, nodes))
    text = f"Tried: no fault is left with {_nodes(nodes)} in float32. Convert the original again with"
    return Cure(f"--keep-fp32 {shlex.quote(names)}", tuple(nodes), text, confirmed=True, trials=trials)
