"""Measures what each rounding costs, and foresees the error of a plan from that
(:mod:`onnxamp._tuning.errors.expected`).
"""

from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TypeAlias

from onnxamp._base.errors import OnnxAmpError, RuntimeFailure
from onnxamp._convert.analysis import Analysis
from onnxamp._convert.convert import decide
from onnxamp._convert.plan import ExpectedError, Plan
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import emulated_arithmetic
from onnxamp._gradients.passes import Sensitivities
from onnxamp._gradients.quantizers import rounds_to_integers
from onnxamp._gradients.sensitivity import SensitivityProbe
from onnxamp._gradients.writer import MIN_OPSET
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.stress import Stress
from onnxamp._rewrite.passes.upgrade import plan_upgrade
from onnxamp._runtime.engines import Engine, choose_engine
from onnxamp._runtime.fingerprints import SentModel, model_print
from onnxamp._runtime.loop import KeptSamples, observe_all
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import Run, RunOptions
from onnxamp._runtime.sessions.session import Provider
from onnxamp._tuning.errors.expected import ExpectedErrors
from onnxamp._tuning.errors.lowered import Settled, computes, low_node, rounded_ports


def judging_engine(provider: Provider | None, target: str = "cuda") -> Engine:
    """Return the engine for converted models: a device with all fusions (CUDA with TF32 off), or an emulation on the
    CPU.

    Args:
        provider: where they run; None for CUDA if it is available, else the CPU.
        target: the target whose sums are emulated, also for a plugin provider, unless that has its own profile.

    Raises:
        ArgumentError: there is no such provider. RuntimeFailure: it cannot be used here.
    """
    engine = choose_engine(provider)
    # A plugin provider computes low precision itself, and sums up by its own profile.
    summing = target if engine.is_reference else engine.provider
    return replace(engine, arithmetic=emulated_arithmetic(summing))


def measured_sensitivities(
    analysis: Analysis,
    run: Run,
    engine: Engine,
    kept: KeptSamples[Sensitivities] | None = None,
    only: int | None = None,
) -> list[Sensitivities]:
    """Return what rounding each value of a graph costs, on each sample, where an analysis says what is rounded.

    Args:
        analysis: of the graph.
        run: the samples, and where the model runs on them.
        engine: that of converted models.
        kept: where measurements are stored.
        only: the number of the one sample that is measured; None for all.

    Raises:
        RuntimeFailure: the model does not run, or a sample ends the processes that run it.
    """
    graph = analysis.graph
    newer = plan_upgrade(graph, MIN_OPSET).result
    probe = SensitivityProbe(
        model=SentModel.of(Model(newer.model, newer.folder)),
        engine=engine.reference,
        low=analysis.options.low,
        budget=run.budget,
        arithmetic=engine.arithmetic,
        lowered=rounded_ports(analysis, Settled.of(analysis)),
    )
    samples = observe_all(
        run,
        probe,
        "measuring sensitivities",
        kept=kept,
        only=only,
        crashed="Sample {sample} of {total} cannot be measured. {crash} Leave it out of the inputs.",
        failed="The model does not run",
        model=Model(graph.model, graph.folder),
    )
    return list(samples)


Known: TypeAlias = dict[tuple[Hashable, ...], list[Sensitivities]]
"""The sensitivities of models by fingerprint, low-precision type and target, and by what a plan lowers if numbers are
rounded to integers."""


def expected_errors(
    model: Model,
    plan: Plan,
    run: Run,
    known: Known | None,
    stressed: Mapping[str, float],
) -> tuple[ExpectedErrors, AbstractSet[str]]:
    """Return the costs of low precision in a model, and the nodes that a plan lowers; see :func:`with_expected_error`.

    ``stressed`` are values that leave the range on hard inputs, with their largest magnitudes there.

    Raises:
        OnnxAmpError: the model does not run, or its results are random.
    """
    analysis = decide(model, plan.options, plan).analysis
    graph = analysis.graph
    low = plan.options.low
    if graph.nodes_of(op_facts().random):
        raise RuntimeFailure(
            "The model draws random numbers, so that two runs of it differ."
        )
    lowered = (low_node(analysis, node) for node in graph.order)
    nodes = [node for node in lowered if node is not None]
    engine = judging_engine(run.provider, plan.target)
    settled = Settled.of(analysis)
    known = {} if known is None else known
    # What arrives at quantizers depends on what the plan lowers; other costs do not.
    lowering = (settled, *nodes) if rounds_to_integers(graph.model) else ()
    print_ = model_print(Model(graph.model, graph.folder))
    key = (print_, low.name, plan.target, *lowering)
    if key not in known:
        known[key] = measured_sensitivities(analysis, run, engine)
    errors = ExpectedErrors(
        graph=graph,
        low=low,
        computing=[node for node in nodes if computes(graph.nodes[node.node])],
        exact=[node for node in nodes if not computes(graph.nodes[node.node])],
        samples=known[key],
        settled=settled,
        stressed=stressed,
    )
    return errors, {node.key for node in nodes}


def with_expected_error(
    model: Model,
    plan: Plan,
    run: Run | RunOptions,
    known: Known | None = None,
    *,
    steps: int,
) -> Plan:
    """Return a plan with the expected error of its result, or with the reason why it is unknown.

    Args:
        model: the original.
        plan: of its conversion.
        run: the samples, and where the model runs on them.
        known: measurements for other plans with the same run; new measurements are added. None for a single plan.
        steps: steps toward inputs that are hard for the result, which show whether values may leave the range.

    Raises:
        ArgumentError: a sample does not fit the model.
    """
    options = plan.options
    ranges = options.input_ranges
    if isinstance(run, RunOptions):
        inputs = requested_samples(run, model, ranges=dict(ranges))
        run = Run(inputs=inputs, report=run.report)
    stressed = dict[str, float]()
    if options.low.is_narrow:
        stress = Stress(options.low, steps, ranges)
        exponents = options.rescaling.exponents if options.rescaling else {}
        stressed = stress.overflowing(model, run.samples, exponents)
    try:
        errors, low = expected_errors(model, plan, run, known, stressed)
    except OnnxAmpError as error:
        return replace(plan, expected=ExpectedError(why=str(error)))
    return replace(plan, expected=errors.foreseen(low))
