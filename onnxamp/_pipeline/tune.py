"""Tuning a pipeline: measure in float32, search, and write all models.

All are written beside their targets and judged there, and then all are renamed. If a result is rejected, nothing
changes. Files are renamed model by model, so each is complete at all times.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple, Unpack

from onnxamp._convert.misspelled import among, misspelled, refuse
from onnxamp._decide.overrides import Unmatched
from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, RuntimeFailure, warn
from onnxamp._job import Job
from onnxamp._job.validation import load_result
from onnxamp._job.writing import Conversion, Sink, StagedConversion, staged_conversion
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import INLINE_LIMIT, Model, ModelSource, weight_bytes
from onnxamp._model.protos import copied
from onnxamp._model.saving import save_model
from onnxamp._model.sources import confirm_sources, release_sources, watched_sources
from onnxamp._numerics.diff import Comparison, UpgradeProof
from onnxamp._numerics.expected import judging_engine
from onnxamp._ops import device_of
from onnxamp._ops.signature import declared_ops
from onnxamp._options.options import OptionKeywords
from onnxamp._options.values import Level
from onnxamp._paths import as_path, made_folder
from onnxamp._pipeline.choices import Choice, Clock, choices_of
from onnxamp._pipeline.manifest import Function, Member, Pipeline, make_pipeline
from onnxamp._pipeline.runs import (
    PART,
    PipelineRuns,
    PipelineState,
    TunedMember,
    TunedPipeline,
    facts_of,
)
from onnxamp._pipeline.search import PIPELINE_SECONDS, RUNS, PipelineSearch
from onnxamp._runtime import BUDGET
from onnxamp._runtime.engines import Engine, engine_on
from onnxamp._runtime.run import Report, Run, RunOptions, silent
from onnxamp._runtime.session import Provider
from onnxamp._state import State, StateLike, opened
from onnxamp._target import AUTO, device_called
from onnxamp._tuning.metric import MetricLike, make_metric
from onnxamp._tuning.results import Search, meant_device
from onnxamp._workers.executor import temporary_folder


class StagedMember(NamedTuple):
    """A model that is written: its file until that is in its place, and the conversion."""

    file: Path
    conversion: StagedConversion


def check_targets(members: Sequence[Member], folder: Path) -> None:
    """Check, before anything runs, that no result replaces a model.

    Raises:
        ArgumentError: a result would replace a model.
    """
    read = {path.resolve() for member in members for path in member.model.files}
    for member in members:
        if (folder / member.file).resolve() in read:
            text = f"{str(folder / member.file)!r} is a model of the pipeline: name another folder for the results."
            raise ArgumentError(text)


@contextmanager
def staged_pipeline(
    members: Sequence[Member],
    chosen: Mapping[str, Choice],
    folder: Path,
    sink: Callable[[Path], Sink],
    provider: Provider,
    scratch: Path,
) -> Iterator[dict[str, StagedMember]]:
    """Write all models of a pipeline, and put them into a folder at the end of the block, unless that raises.

    Args:
        members: the models.
        chosen: the choice for each model.
        folder: the folder to write to; each model keeps its own name.
        sink: how to write a file.
        provider: where models ran.
        scratch: a folder for models that do not come from a file.

    Raises:
        RuntimeFailure: ONNX Runtime does not load a result. OutputError: something cannot be written. Others as
            :func:`onnxamp._convert.convert.convert`.
    """
    staged: dict[str, StagedMember] = {}
    with ExitStack() as stack:
        for member in members:
            choice = chosen[member.name]
            target = folder / member.file
            made_folder(target.parent)
            job = Job(
                model=member.model
                if member.model.path is not None
                else _in_file(member.model, scratch / member.file),
                options=choice.plan.options,
                plan=None if choice.is_float32 else choice.plan,
            )
            made = stack.enter_context(staged_conversion(job, sink(target)))
            file = stack.enter_context(made.saved.stage.shown())
            _check_loads(member, choice, file, provider)
            staged[member.name] = StagedMember(file, made)
        yield staged
    release_sources()  # the results are in their places


def _in_file(model: Model, path: Path) -> Model:
    """Return the model, written to a file and read from there."""
    made_folder(path.parent)
    proto = copied(model.proto)
    save_model(
        proto,
        path,
        WeightConverter(FLOAT16, model.folder),
        external=weight_bytes(proto) > INLINE_LIMIT,
    )
    return Model.read(path)


def _check_loads(
    member: Member, choice: Choice, path: Path, provider: Provider
) -> None:
    """Load a file with ONNX Runtime, in a separate process."""
    options = choice.plan.options
    is_meant = (
        provider == device_of(options.target) and engine_on(provider).is_reference
    )
    place = provider if is_meant else None
    loaded = load_result(Model.read(path), member.model, place)
    if loaded.fault and not loaded.original:
        raise RuntimeFailure(
            f"{loaded.by} does not load the model {member.name!r} at {choice.label}: {loaded.fault}. Nothing was"
            " written; leave that choice out with levels or dtypes of the model in the manifest."
        )


class UnmatchedNames(NamedTuple):
    """Names in options that match nothing.

    Attributes:
        by_model: name of a model -> the warnings about names that match nothing in it.
        anywhere: the names that match nothing in any model whose options contain them.
    """

    by_model: Mapping[str, frozenset[str]]
    anywhere: tuple[Unmatched, ...]


def find_unmatched(pipeline: Pipeline) -> UnmatchedNames:
    """Find the names in options that match nothing in the models.

    Raises:
        ArgumentError: a name matches nothing, and the options are strict about names.
    """
    asked = {
        member.name: member.asked(Level.O2, "float16") for member in pipeline.members
    }
    found = {
        member.name: misspelled(member.model, asked[member.name])
        for member in pipeline.members
    }
    anywhere = among((asked[name], rows) for name, rows in found.items())
    if any(options.strict_options for options in asked.values()):
        refuse(anywhere)
    return UnmatchedNames(
        {name: frozenset(one.text for one in rows) for name, rows in found.items()},
        anywhere,
    )


_LOG: Final = logging.getLogger("onnxamp")


@watched_sources()
def tune_pipeline(
    pipeline: str | PathLike[str] | Mapping[str, ModelSource],
    function: str | Function | None = None,
    tolerance: float | None = None,
    *,
    output: str | PathLike[str] | None = None,
    metric: MetricLike | None = None,
    better: str | None = None,
    dtypes: tuple[str, ...] | None = None,
    levels: tuple[str, ...] | None = None,
    device: str = AUTO,
    provider: Provider | None = None,
    runs: int = RUNS,
    seconds: float = PIPELINE_SECONDS,
    state: StateLike = None,
    progress: Report | None = None,
    budget: int = BUDGET,
    allow_slower: bool = False,
    **options: Unpack[OptionKeywords],
) -> TunedPipeline:
    """Decide how much to lower in each of several models that work together, under one tolerance.

    A function runs the models and returns a number, such as a word error rate, or outputs. A first run in float32
    records the inputs of each model. Then one model after another is converted, until the result is as fast as the
    tolerance allows. See :doc:`/how-to/pipelines`.

    Args:
        pipeline: a manifest in TOML, or a dict of models by name (ModelProtos, paths, onnx-graphsurgeon Graphs). The
            function that a manifest names is imported and called, so pass only manifests that you trust.
        function: called with the models by name, each with a method ``run(output_names, feeds)`` like that
            of ONNX Runtime's sessions. It returns a number, or a dict of arrays by name, and must be deterministic, so
            seed random numbers. A name is "package:function" or "file.py:function". None for that of the manifest.
        tolerance: by how much the pipeline may be worse than in float32 with all models together, in units of
            the number or of the metric. None for that of the manifest, or 1e-2.
        output: folder for the converted models; None to write nothing.
        metric: how outputs are compared with those in float32, as for :func:`tune_model`.
        better: which of two numbers is better: "lower", the default, or "higher".
        dtypes: the low types to try; both by default. levels: the levels to try; all by default.
        device: the device to estimate times for, such as "A100" or "H100"; "auto" for the installed GPU, or
            an A100 if none is known.
        provider: where converted models run: "cuda", as they are, or "cpu", emulated. None for CUDA if there is a
            device.
        runs: how often the pipeline may run, in addition to two runs in float32.
        seconds: the time limit, after which no further run begins and the results so far are used.
        state: a file that keeps measurements, so that an interrupted tuning resumes. The function then needs a name.
        progress: called with the current activity, the runs done, and their number.
        budget: bytes of values and weights that a run on the CPU may keep in memory at a time, in addition to the
            models.
        allow_slower: also accept choices that are estimated to be slower than float32, to make weights smaller.
        options: those of :func:`onnxamp.convert_model`, for all models, except dtype and rescale, which the search
            decides.

    Returns:
        The decisions and measurements, with a plan for each model (see :func:`apply_plan`). If nothing meets the
        tolerance, all models stay in float32.

    Raises:
        RuntimeFailure: the function fails in float32, or returns a different result in a second run.
        ArgumentError: the manifest or an argument is wrong. ModelError: a model cannot be read.
        OutputError: a result cannot be written; in that case, no result is put in place.

    Example:
        >>> import onnxamp
        >>> tuned = onnxamp.tune_pipeline("models/speech/pipeline.toml", tolerance=0.02, provider="cpu")
        >>> {model.name: model.is_float32 for model in tuned.models}
        {'text_encoder': False, 'acoustic': False, 'vocoder': True}
        >>> encoder16 = onnxamp.apply_plan("models/speech/text_encoder.onnx", tuned["text_encoder"].plan)
    """
    said = {
        "function": function,
        "tolerance": tolerance,
        "metric": metric,
        "better": better,
        "dtypes": dtypes,
        "levels": levels,
        "options": options,
    }
    search = Search(
        device=device, runs=runs, seconds=seconds, allow_slower=allow_slower
    )
    run = RunOptions(
        provider=provider, state=state, report=progress or silent, budget=budget
    )
    folder = None if output is None else as_path(output)
    tuned = run_tuning(make_pipeline(pipeline, said), search, run, folder)
    if output is None:
        confirm_sources()
    warn(tuned.warnings)
    return tuned


def run_tuning(
    pipeline: Pipeline,
    asked: Search,
    options: RunOptions,
    output: Path | None = None,
    sink: Callable[[Path], Sink] = Sink,
) -> TunedPipeline:
    """Tune a pipeline as :func:`tune_pipeline` does, with checked arguments; ``sink`` determines how files are written.

    Raises:
        As :func:`tune_pipeline`.
    """
    if output is not None:
        check_targets(pipeline.members, output)
    if options.state is not None and not (
        ":" in pipeline.called and isinstance(pipeline.metric, str)
    ):
        raise ArgumentError(
            "A state file needs a function with a name: write it as 'package:function'."
        )
    with ExitStack() as stack:
        for member in pipeline.members:
            stack.enter_context(
                declared_ops(member.asked(Level.O2, "float16").custom_ops)
            )
        unmatched = find_unmatched(pipeline)
        folder = stack.enter_context(temporary_folder())
        kept = stack.enter_context(opened(options.state))
        job = _Job(pipeline, asked, options, folder, kept, unmatched)
        search = job.searched()
        if output is None:
            return job.outcome(search, {}, None, None, "nothing was written")
        chosen = search.decided
        options.report("writing", 0, 0)
        with staged_pipeline(
            members=pipeline.members,
            chosen=chosen,
            folder=output,
            sink=sink,
            provider=job.runs.engine.provider,
            scratch=folder / "source",
        ) as staged:
            files = {name: one.file for name, one in staged.items()}
            error, note = job.judged(files, chosen)
        made = {name: one.conversion.outcome() for name, one in staged.items()}
        return job.outcome(search, made, output, error, note)


class _Job:
    """One tuning: the runner of the pipeline, and its measurements. It begins with two runs in float32."""

    def __init__(
        self,
        pipeline: Pipeline,
        asked: Search,
        options: RunOptions,
        folder: Path,
        kept: State | None,
        unmatched: UnmatchedNames,
    ) -> None:
        metric = make_metric(pipeline.metric, pipeline.tolerance)
        targets = {
            member.name: member.asked(Level.O2, "float16").target
            for member in pipeline.members
        }
        engines = {
            name: judging_engine(options.provider, target)
            for name, target in targets.items()
        }
        common = set(targets.values())
        low = _names(engines, "float16")
        part = None
        if kept is not None:
            part = kept.part(PART, facts_of(pipeline, metric.name, low))
        self.options = options
        self.unmatched = unmatched
        self.runs = PipelineRuns(
            pipeline=pipeline,
            engines=engines,
            metric=metric,
            folder=folder,
            budget=options.budget,
            state=PipelineState(part),
        )
        device = meant_device(asked.device, common.pop() if len(common) == 1 else "")
        self.asked = replace(asked, tolerance=metric.tolerance, device=device)
        options.report("running in float32", 0, asked.runs)
        self.runs.start()
        self.noise = self.runs.measure({}).error
        if self.noise > metric.tolerance:
            raise RuntimeFailure(
                f"The function {pipeline.called!r} returns different results each time: two runs in float32 differ by"
                f" {self.noise:.2g}, more than the tolerance of {metric.tolerance:g}. Seed everything random in it."
            )

    def searched(self) -> PipelineSearch:
        """Search, and return the finished search."""
        runs = self.runs
        asked = self.asked
        device = device_called(asked.device)
        provider = runs.engine.reference.provider
        clocks = {name: Clock(calls, device) for name, calls in runs.calls.items()}
        float32 = dict[str, Choice]()
        choices = dict[str, list[Choice]]()
        for member in runs.pipeline.members:
            name = member.name
            self.options.report(f"looking at {name}", 0, asked.runs)
            samples = runs.samples(name)
            run = Run(inputs=samples, provider=provider, budget=self.options.budget)
            proof = UpgradeProof(Comparison.of(member.model, run))
            float32[name], choices[name] = choices_of(
                member,
                samples,
                clocks[name],
                provider,
                proof,
                allow_slower=asked.allow_slower,
            )

        search = PipelineSearch(
            float32=float32,
            choices=choices,
            refined=frozenset(
                m.name for m in runs.pipeline.members if Level.AUTO in m.levels
            ),
            asked=asked,
            runs=runs,
            clocks=clocks,
            options=self.options,
        )
        search.search()
        _LOG.info(
            "tuned a pipeline of %d models in %d runs",
            len(float32),
            len(search.trials),
        )
        return search

    def judged(
        self, paths: Mapping[str, Path], chosen: Mapping[str, Choice]
    ) -> tuple[float | None, str]:
        """Return the error of a run with the written files, or the reason why there was no such run.

        Raises:
            RuntimeFailure: the files do not run on the provider, or miss the tolerance.
        """
        self.options.report("running the written files", 0, 0)
        found = self.runs.written(paths)
        name = self.runs.engine.provider
        if found.failure and self.runs.engine.emulates:
            return None, f"on {name.upper()}: {found.failure.rstrip('.')}"
        if found.error > self.asked.tolerance and any(
            not choice.is_float32 for choice in chosen.values()
        ):
            raise RuntimeFailure(
                f"As written, the pipeline is {found.error:.3g} worse than in float32, more than the tolerance of"
                f" {self.asked.tolerance:g}: {found.failure or 'its sessions compute something else'}. The"
                " results were not put in place."
            )
        return found.error, ""

    def outcome(
        self,
        search: PipelineSearch,
        made: Mapping[str, Conversion],
        output: Path | None,
        written: float | None,
        note: str,
    ) -> TunedPipeline:
        """Return the result of the tuning."""
        runs = self.runs
        chosen = search.decided
        pipeline = runs.pipeline
        state = runs.state
        last = runs.measure(chosen)
        members = tuple(
            self._tuned(search, member, made.get(member.name))
            for member in pipeline.members
        )
        lowest = next(
            (one.plan.dtype for one in chosen.values() if not one.is_float32),
            "float32",
        )
        metric = "" if runs.value is not None else runs.metric.name
        said = (
            *(one.text for one in self.unmatched.anywhere),
            *(
                f"{name}: {text}"
                for name, one in chosen.items()
                for text in one.plan.warnings
                if text not in self.unmatched.by_model[name]
            ),
        )
        return TunedPipeline(
            models=members,
            order=tuple(search.errors),
            source=pipeline.path,
            output=output,
            function=pipeline.called,
            metric=metric,
            better=pipeline.better,
            tolerance=self.asked.tolerance,
            reference=runs.value,
            value=last.value,
            error=last.error,
            held=last.error <= self.asked.tolerance,
            noise=self.noise,
            ran_on=_names(runs.engines, lowest),
            written_error=written,
            note=note,
            runs=state.made,
            recalled=len(state.recalled),
            stopped=search.stopped,
            device=self.asked.device,
            trials=tuple(search.trials),
            warnings=tuple(dict.fromkeys(said)),
        )

    def _tuned(
        self, search: PipelineSearch, member: Member, made: Conversion | None
    ) -> TunedMember:
        """Return a model with its decision."""
        name = member.name
        choice = search.decided[name]
        before = search.float32[name]
        alone = search.alone.get(name)
        return TunedMember(
            name=name,
            source=member.model.label,
            target=None if made is None else made.target,
            plan=choice.plan,
            choice=choice.label,
            exponents=choice.exponents,
            calls=self.runs.calls[name].count,
            alone=alone[1] if alone is not None and alone[0] is choice else None,
            error=search.errors[name],
            time_before=before.time,
            time=choice.time,
            weights_before=before.weights if made is None else made.bytes_before,
            weights=choice.weights if made is None else made.bytes_after,
            nodes=0 if choice.is_float32 else choice.nodes,
        )


def _names(engines: Mapping[str, Engine], low: str) -> str:
    """Return the name of the engine of the models in reports."""
    return " and ".join(dict.fromkeys(engine.name(low) for engine in engines.values()))
