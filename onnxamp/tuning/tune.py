"""Level auto: measure, price, cut, verify, and write down what was found.

1. One instrumented pass per sample: every op's own error (:func:`~onnxamp.tuning.probe.measure_locally`).
2. Runs with blocks of ops low, one session for all of them: what ops do to the outputs (:mod:`onnxamp.tuning.blocks`).
3. The minimum cut, errors charged at a rate: the most low precision that is predicted to stay within the tolerance
   (:mod:`onnxamp.tuning.search`). A run verifies it; a miss halves the block that dominates; a hit is pushed further
   (:mod:`onnxamp.tuning.hunt`).
4. The winner is converted for real, and compared on all samples. A miss there asks for a tighter choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Final

from onnx import ModelProto

from onnxamp.analysis import Analysis, analyse
from onnxamp.constants import Constants
from onnxamp.convert import convert_with, load_any, plan_policy
from onnxamp.errors import ArgumentError, RuntimeFailure
from onnxamp.numerics.diff import at_least_one
from onnxamp.plan import Plan, make_plan
from onnxamp.policy import make_policy
from onnxamp.precision import Prices
from onnxamp.prepare import prepare
from onnxamp.roofline import DEFAULT_DEVICE, device_called
from onnxamp.runtime.samples import Samples, random_samples
from onnxamp.tuning.hunt import PRICING, Hunt, Told, pareto
from onnxamp.tuning.memory import Memory, fingerprint, recall
from onnxamp.tuning.metric import Metric, make_metric
from onnxamp.tuning.paths import choose_samples, find_live
from onnxamp.tuning.probe import Probe, measure_locally, verify
from onnxamp.tuning.search import Candidate, Chooser
from onnxamp.tuning.units import Space, find_space, prices_for

_SUBSET: Final = 4
"""Samples of a mask run; verification takes all."""

_ATTEMPTS: Final = 4
"""Searches that a tuning may take: each asks for less error than the last, if converted models missed the tolerance."""


_STEP: Final = 0.3
"""At most so much smaller is the error that the next search asks for."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A node that stays float32: why in a few words, and what was measured."""

    node: str
    op: str
    why: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found.

    ``error`` is the chosen candidate's, of the converted model itself on all samples; ``noise`` the float32 model's
    against itself; ``runs`` counts the mask runs that were made, ``recalled`` those that an earlier tuning had made;
    ``conversions`` counts real ones; ``units`` are nodes that could be low; ``chosen`` is the position of the candidate
    that was written.
    """

    plan: Plan
    metric: str
    tolerance: float
    inputs: str
    samples: int
    noise: float
    error: float
    runs: int
    recalled: int
    conversions: int
    units: int
    candidates: tuple[Candidate, ...]
    chosen: int
    kept: tuple[Kept, ...]
    device: str
    held: bool
    """Whether ``error`` is within the tolerance."""


def tune_model(
    model: Any,
    tolerance: float = 1e-2,
    *,
    metric: str = "rel-l2",
    samples: Samples | None = None,
    count: int = 4,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    device: str = DEFAULT_DEVICE,
    runs: int = PRICING,
    state: str | Path | None = None,
    pick: int | None = None,
    opset: int | None = None,
    told: Told | None = None,
    **wishes: Any,
) -> tuple[ModelProto, Tuned]:
    """Lower as much of a model as its accuracy allows.

    Args:
        model: a ModelProto or a path; it is not changed.
        tolerance: the largest error that is accepted; see ``metric``.
        metric: what the error is, see :func:`~onnxamp.tuning.metric.make_metric`.
        samples: inputs; made up (``count`` of them, seeded, sizes from ``dims``) where None.
        device: whose speed the costs are of, see ``data/devices.toml``.
        runs: mask runs that prices may take; candidates take up to 18 more.
        state: a file that measurements are kept in: with it an interrupted tuning goes on where it was, and ``pick``
            or another tolerance need few runs or none.
        pick: take this candidate instead of the one that would be chosen, whatever its error.
        opset, wishes: as :func:`onnxamp.convert_model`, but for level and lists, which data replace.
        told: called with what is being done, how far it is, and how far it will go.

    Returns:
        The converted model, and what was found. Where no candidate holds the tolerance, nothing is low.

    Raises:
        RuntimeFailure: the model does not run, or misses the tolerance in float32 already.
        ArgumentError: an argument is wrong. ModelError: the model cannot be read.
    """
    policy = make_policy("auto", **wishes)
    proto, chosen, judge = load_any(model), device_called(device), make_metric(metric, tolerance)
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise ArgumentError(f"runs must be a whole number of at least 1, not {runs!r}.")
    prepared = prepare(proto, policy, opset).model
    samples = random_samples(proto, count, seed=seed, dims=dims) if samples is None else samples
    at_least_one(samples)
    live = find_live(prepared, samples)
    subset = choose_samples(live, _SUBSET)
    space = find_space(prepared, policy, None, chosen).seen(frozenset().union(*(live[number] for number in subset)))
    memory = Memory("")
    if state is not None:
        words = [metric, policy.low.name, *(f"{u.key} {u.op} {u.ports}" for u in (*space.units, *space.followers))]
        memory = recall(fingerprint(words, prepared, samples), Path(state))
    job = _Job(prepared, proto, opset, space, samples, judge, memory)
    told = told or (lambda *_: None)
    probe = Probe(prepared, space.ports(), policy.low, samples, judge)
    noise = _noise(job, probe, subset)
    job.measure_locally(told)
    base = analyse(prepared, policy, prices=Prices({**space.pins, **job.pins}))
    chooser = Chooser(space, base, chosen, Constants(base.view, base.types, policy.low, None), job.broken)
    local = [row.error for row in memory.locals]
    hunt = Hunt(chooser, probe, memory, local, subset, runs, told)
    return _finish(job, hunt, noise, pick)


def _noise(job: "_Job", probe: Probe, subset: Sequence[int]) -> float:
    """The error of the float32 model against itself, run again.

    Raises:
        RuntimeFailure: it misses the tolerance.
    """
    if not job.space.units:
        return 0.0
    noise = job.memory.error((), subset, lambda: probe.error(frozenset(), subset))
    if not job.metric.holds(noise):
        raise RuntimeFailure(
            f"The float32 model misses the tolerance already: run twice on the same inputs it is off by {noise:.2g},"
            f" and {job.metric.tolerance:g} is wanted. It is not deterministic; no precision can cure that."
        )
    return noise


@dataclass(slots=True)
class _Job:
    prepared: ModelProto
    proto: ModelProto
    opset: int | None
    space: Space
    samples: Samples
    metric: Metric
    memory: Memory
    verified: dict[frozenset[str], float] = field(default_factory=dict)
    """Low nodes of a candidate -> error of the converted model."""

    @property
    def broken(self) -> dict[str, str]:
        """Units that go wrong on their own, with the reason."""
        rows = zip(self.space.units, self.memory.locals, strict=True)
        return {unit.key: local.broken for unit, local in rows if local.broken}

    @property
    def pins(self) -> dict[int, str]:
        """The same by node, and nodes that cannot be measured."""
        broken = self.broken
        return {**self.space.pins, **{u.node: broken[u.key] for u in self.space.units if u.key in broken}}

    def measure_locally(self, told: Told) -> None:
        """The instrumented pass, unless the memory has it."""
        if len(self.memory.locals) != len(self.space.units):
            lowered = self.converted(make_plan(self.space.all_low, self.opset))
            self.memory.locals = measure_locally(
                self.prepared, lowered, self.space.units, self.samples, self.space.all_low.policy.low,
                lambda done, total: told("measuring each op", done, total),
            )  # fmt: skip
            self.memory.save()

    def converted(self, plan: Plan) -> ModelProto:
        model: ModelProto = convert_with(self.proto, plan_policy(plan), plan.opset, plan)
        return model

    def error(self, found: Candidate, model: ModelProto) -> float:
        """The converted model's error on all samples."""
        if found.low not in self.verified:
            self.verified[found.low] = verify(self.prepared, model, self.samples, self.metric)
        return self.verified[found.low]

    def plan(self, found: Candidate, kept: Sequence[Kept]) -> Plan:
        """The plan that lowers exactly these nodes, each float32 one with its measured reason."""
        units, space = self.space.units, self.space
        exact = [0.0 if unit.key in found.low else inf for unit in units]
        spared = {unit.node for unit in space.followers if unit.key not in found.low}
        analysis = analyse(self.prepared, space.all_low.policy, prices=prices_for(units, exact, self.pins, spared))
        plan = make_plan(analysis, self.opset)
        told = {row.node: f"{row.why}: {row.detail}" if row.detail else row.why for row in kept}
        why = {unit.node: told.get(unit.label) for unit in units}
        rows = [
            row if row.low or not (text := why.get(variable.node)) else replace(row, reason="measured", detail=text)
            for row, variable in zip(plan.rows, analysis.terms.variables, strict=True)
        ]
        return replace(plan, rows=tuple(rows))

    def kept(self, low: frozenset[str], prices: Sequence[float], base: Analysis) -> list[Kept]:
        """Why nodes stay float32, where measuring has to do with it; ``base`` knows what pins do to others."""
        broken, nodes, found = self.broken, self.space.all_low.view.nodes, []
        for unit, cost in zip(self.space.units, prices, strict=True):
            share = cost / self.metric.tolerance**2
            if unit.key in low:
                continue
            if unit.key in broken:
                found.append(Kept(unit.label, unit.op, "breaks on its own", broken[unit.key]))
            elif (tie := _tie(base, unit.node)) is not None:
                found.append(Kept(unit.label, unit.op, "goes with others", tie))
            elif cost == inf:
                found.append(Kept(unit.label, unit.op, "breaks the outputs", "with its block"))
            elif share < _NOTHING:
                found.append(Kept(unit.label, unit.op, "not worth its Casts", ""))
            else:
                text = f"it would use {share:.1%} of the squared error that is allowed"
                found.append(Kept(unit.label, unit.op, "costs accuracy", text))
        found += [Kept(nodes[i].label, nodes[i].key, "not measured", why) for i, why in self.space.pins.items()]
        return found


def _tie(base: Analysis, node: int) -> str | None:
    """The pin to float32 that a node shares with others."""
    pins = (base.pins.verdicts.get(base.terms.root(variable)) for variable in base.terms.of_node.get(node, {}).values())
    return next((f"{pin.reason.value}: {pin.detail}" for pin in pins if pin is not None and not pin.low), None)


_NOTHING: Final = 5e-4
"""Share of the squared tolerance below which an error is none."""


def _finish(job: _Job, hunt: Hunt, noise: float, pick: int | None) -> tuple[ModelProto, Tuned]:
    """Convert for real: the best candidate whose converted model holds the tolerance on all samples."""
    told, tolerance, wanted = hunt.told, job.metric.tolerance, job.metric.tolerance
    attempt = 0
    while True:
        attempt += 1
        prices = hunt.search(wanted)
        nothing = hunt.chooser.candidate(frozenset(), prices, noise)
        front = [found for found in pareto([*hunt.found, nothing]) if found.low] + [nothing]
        order = [i for i, found in enumerate(front) if found.low and _least(found) <= wanted]
        last = attempt == _ATTEMPTS or not order or hunt.left <= 0
        if pick is not None:
            order, last = [_checked(pick, front)], True
        elif last:
            order.append(len(front) - 1)
        for number in order:
            kept = job.kept(front[number].low, prices, hunt.chooser.base)
            plan = job.plan(front[number], kept)
            model = job.converted(plan)
            told("verifying the converted model", len(job.verified) + 1, len(job.verified) + 1)
            error = job.error(front[number], model)
            if job.metric.holds(error) or (last and number == order[-1]):
                return model, Tuned(
                    plan, job.metric.name, tolerance, job.samples.description, len(job.samples), noise, error,
                    hunt.probe.runs, len(job.memory.recalled), len(job.verified),
                    len(job.space.units), tuple(front), number, tuple(kept), hunt.chooser.device.name,
                    job.metric.holds(error),
                )  # fmt: skip
        # What mask runs show of some samples must be lower by as much as the worst of all samples is too high.
        wanted = min(wanted, _least(front[number])) * max(_STEP, min(0.9, 0.9 * tolerance / error))


def _least(found: Candidate) -> float:
    return found.predicted if found.error is None else found.error


def _checked(pick: int, front: Sequence[Candidate]) -> int:
    if not 0 <= pick < len(front):
        raise ArgumentError(f"There is no candidate {pick}: there are {len(front)}, counted from 0.")
    return pick
