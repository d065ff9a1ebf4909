"""Code that commands share: their options as arguments of the library, writing a page, and printing a report."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import click
import numpy as np
from click.core import ParameterSource

from onnxamp._base.errors import ArgumentError, OnnxAmpError, printable
from onnxamp._base.extensions import extensions
from onnxamp._base.paths import is_remote
from onnxamp._base.place import Place
from onnxamp._cli.options import DataOption
from onnxamp._convert.plan import Plan
from onnxamp._facts.providers import is_plugin
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import targets
from onnxamp._job import Validation
from onnxamp._job.writing import Sink
from onnxamp._model.model import Model
from onnxamp._options.command_line import spelled_fields
from onnxamp._options.options import Options
from onnxamp._options.values import Level, is_auto
from onnxamp._runtime import BUDGET
from onnxamp._runtime.run import Report, RunOptions, silent
from onnxamp._runtime.sizes import Sizes

if TYPE_CHECKING:
    from onnxamp._job.pipeline import Outcome
    from onnxamp._report import parts
    from onnxamp._runtime.inputs.samples import Samples, SampleSource

Given: TypeAlias = SimpleNamespace
"""The arguments and options of a command, by name."""


_IN_ANY_CASE: Final = frozenset(
    (
        "--no-validate",
        "--custom-ops-library",
        "--jobs",
        "--cluster",
        "--state",
        "--retry",
    )
)
"""Options about runs that a command may state whether anything runs or not."""


class FolderKind(Protocol):
    """A kind of folders of models: the form in which the software that loads such a folder expects its models."""

    @property
    def name(self) -> str:
        """The name of the software."""

    @property
    def dtypes(self) -> Sequence[str]:
        """The low-precision types that it supports."""

    def adapted(
        self, options: Options, given: Collection[str], model: Model
    ) -> Options:
        """Return the options for a model of such a folder, except those that were ``given``."""

    def limits_of(self, model: Model) -> Mapping[str, Mapping[str, float]]:
        """Return the limits that suffice for a model, by metric and output."""


def tell(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, -q or not: a mistake in an option must not stay unseen."""
    for text in warnings:
        from onnxamp._cli.printing import print_warning  # noqa: PLC0415 - few commands warn

        print_warning(text)


def show(
    given: Given,
    report: Callable[[], "parts.Report"],
    kind: str,
    facts: Callable[[], Mapping[str, Any]],
) -> None:
    """Print the requested format: nothing, the facts as JSON of a kind, or the report, in Markdown or as it is.

    Raises:
        OutputError: standard output cannot be written. BrokenPipeError: its reader is gone.
    """
    if getattr(given, "quiet", None):  # some commands have no such option
        return
    from onnxamp._cli.printing import print_in  # noqa: PLC0415 - quiet commands print nothing

    verbose = getattr(given, "verbose", False)
    is_asked = getattr(given, "provider", None) is not None
    print_in(given.format, report, kind, facts, verbose=verbose, is_asked=is_asked)


def validation_options(given: Given) -> Validation:
    """Return how results are validated, as far as models and folders have the same options for it."""
    return Validation(
        tolerance=given.tolerance,
        no_cure=given.no_cure,
        cure_time=given.cure_time,
        stress=given.stress,
    )


def keep_outcome(given: Given, outcome: "Outcome") -> None:
    """Write the plan and the page of a conversion, if they were requested."""
    conversion = outcome.conversion
    if given.save_plan:
        conversion.plan.save(given.save_plan)
    if given.html:
        from onnxamp._report.html.conversion import write_conversion  # noqa: PLC0415 - few conversions have a page

        feeds = first_arrays(outcome.samples)
        write_conversion(
            conversion,
            outcome.tuned,
            Model.read(conversion.target),
            given.html,
            compared=outcome.compared,
            shapes={name: feed.shape for name, feed in feeds.items()},
        )


def first_arrays(samples: "Samples | None") -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of the first sample, if any, for whose shapes volumes are estimated and engines built."""
    try:
        feeds = samples[0] if samples is not None else {}
    except OnnxAmpError:  # running the model reports it
        return {}
    return {name: feed for name, feed in feeds.items() if isinstance(feed, np.ndarray)}


def typed_options() -> frozenset[str]:
    """Return the names of the options that the command line spells."""
    context = click.get_current_context()
    return frozenset(
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )


def typed_flags(*groups: str) -> list[str]:
    """Return the flags of the options of these groups of the help that the command line spells, in its order, but not
    those of :class:`onnxamp.Options`, which decide without a run.
    """
    typed = typed_options()
    return [
        item.opts[0]
        for item in click.get_current_context().command.params
        if item.name in typed
        and isinstance(item, DataOption)
        and item.row.group in groups
        and not item.row.field
    ]


def flag_of(name: str) -> str:
    """Return the flag of an option of this command, as in "--save-plan"."""
    options = click.get_current_context().command.params
    return next(item.opts[0] for item in options if item.name == name)


def refuse_idle_options(given: Given, plan: Plan | None, options: Options) -> None:
    """Check that every option about runs and validation has an effect.

    Raises:
        ArgumentError: one has none.
    """
    if given.accept is not None and not given.validate and given.level != Level.AUTO:
        raise ArgumentError(
            "--accept judges the validation, but --no-validate skips it: drop one of the two."
        )
    level = given.level if plan is None else plan.level
    is_measured = options.measures if plan is None else options.compensates
    if not (given.validate or given.expected_error or is_measured):
        _check_no_run()
    is_auto(level, given.tolerance, None, given.metric, validates=given.validate)


def _check_no_run() -> None:
    """Check that no option is about a run, as nothing runs. Some say where a command works in any case.

    Raises:
        ArgumentError: there is one.
    """
    typed = typed_flags("Inputs and runs", "Validation")
    unused = [flag for flag in typed if flag not in _IN_ANY_CASE]
    if unused:
        raise ArgumentError(
            f"--no-validate runs nothing here, so {', '.join(unused)} would have no effect: drop one or the other."
        )


def target_of_engine(given: Given, target: str) -> str:
    """Return the target of the engine of ``--provider``, unless another one was requested; ``target`` if it has
    none.
    """
    engine = (given.provider or "cpu").partition(":")[0]
    asked = "target" in typed_options()
    own = is_plugin(engine) and engine in targets()
    return target if asked or not own or device_of(target) == engine else engine


def unlike_target(given: Given, target: str) -> list[str]:
    """Return a warning if the engine of ``--provider`` has a target of its own, and no other one was requested."""
    engine = target_of_engine(given, target)
    if engine == target:
        return []
    return [
        f"Converted for {target}, but validated on {engine}: --target {engine} converts for its kernels and arithmetic."
    ]


def _changed(given: Given, *names: str) -> dict[str, Any]:
    """Return the flags of these options whose values differ from their defaults, with these values."""
    changed = dict[str, Any]()
    for item in click.get_current_context().command.params:
        if isinstance(item, DataOption) and item.name in names:
            value = getattr(given, item.name)
            if value != item.row.default:
                changed[item.row.flags] = value
    return changed


def sampling_arguments(given: Given) -> tuple[str, ...]:
    """Return the arguments with which another command runs on the same inputs and judges in the same way."""
    accept = getattr(given, "accept", None)
    judge = (*(("--accept", accept.name) if accept else ()), *custom_arguments(given))
    if given.inputs:
        return "--inputs", str(given.inputs), *judge
    if getattr(given, "prompts", None):
        seed = ("--seed", str(given.seed)) if given.seed else ()
        return "--prompts", str(given.prompts), *seed, *judge
    words = list[str]()
    for name, size in given.dims.items():
        words += "--dim", f"{name}={size}"
    for flag, value in _changed(given, "count", "seed").items():
        words += flag, str(value)
    return *words, *judge


def custom_arguments(given: Given) -> tuple[str, ...]:
    """Return the arguments with which another command recognizes and runs the same custom ops."""
    declared = ("--custom-ops", str(given.custom_ops)) if given.custom_ops else ()
    libraries = [("--custom-ops-library", str(path)) for path in given.libraries]
    return *declared, *chain.from_iterable(libraries)


def given_samples(given: Given) -> "Samples | None":
    """Return the samples in the file or folder that ``--inputs`` names; None without it.

    Raises:
        ArgumentError: they cannot be read, or options for random inputs are also given.
    """
    if not given.inputs:
        return None
    if given.dims or _changed(given, "count", "seed"):
        raise ArgumentError(
            "--inputs replaces random inputs, so --samples, --dim and --seed have no effect."
        )
    from onnxamp._runtime.inputs.samples import load_samples  # noqa: PLC0415 - only what runs models needs it

    return load_samples(given.inputs)


def given_prompts(given: Given) -> "SampleSource | None":
    """Return the prompts that ``--prompts`` names; None without it.

    Raises:
        ArgumentError: the file cannot be read, or options for other inputs are also given.
    """
    path = getattr(given, "prompts", None)
    if path is None:
        return None
    if given.inputs:
        raise ArgumentError(
            "--inputs and --prompts both supply inputs: drop one of the two."
        )
    if given.dims or _changed(given, "count"):
        raise ArgumentError(
            "--prompts replaces random inputs, so --samples and --dim have no effect."
        )
    prompts = extensions("samples")["prompts"].load().Prompts(path)
    prompts.lines()  # a file that cannot be read is a mistake even where nothing runs
    source: SampleSource = prompts
    return source


def check_dims(model: Model, given: Given) -> None:
    """Check the names of ``--dim`` if no sample does.

    Raises:
        ArgumentError: the model has no such dimension.
    """
    if given.dims:
        Sizes.of(model.proto.graph.input).resolve(given.dims)


def sink_of(given: Given, target: Path) -> Sink:
    """Return where a converted model goes, and how."""
    names = given.data_names or "onnx"
    return Sink(target, given.external_data, given.shard_bytes, names)


def options_of(given: Given, level: str | None = None) -> Options:
    """Return the :class:`Options` that the command line spells, at ``level`` or the one that is given.

    They are strict about names that match nothing.

    Raises:
        ArgumentError, ContradictionError: a value is wrong.
    """
    keywords: dict[str, Any] = {"strict_options": True}
    for name, spelled in spelled_fields().items():
        keywords[name] = spelled.meaning(getattr(given, name))
    return Options.of(level or str(getattr(given, "level", Level.O2)), keywords)


def place_of(given: Given) -> Place:
    """Return the requested worker processes.

    Raises:
        ArgumentError: a value is wrong.
    """
    return Place(given.jobs, given.cluster)


def chosen_options() -> frozenset[str]:
    """Return the options of the conversion that were typed, or come from a preset or the environment."""
    context = click.get_current_context()
    return frozenset(
        name
        for name in spelled_fields()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    )


def overridden_by_plan() -> list[str]:
    """Return a warning about options that a plan replaces."""
    typed = typed_options() & {*spelled_fields(), "level"}
    context = click.get_current_context()
    given = [item.opts[0] for item in context.command.params if item.name in typed]
    if chosen_options() & {*(context.default_map or ())}:
        given.append("the options of --preset")
    return [f"The plan overrides {', '.join(given)}."] if given else []


def in_its_folder(
    given: Given, options: Options, model: Model, *, previews: bool = False
) -> Options:
    """Return the options for a model, with the types that the software expects if the kind of its folder is known.

    Unless the command is quiet, a sentence says so, because converting the whole folder does more. A command that only
    ``previews`` a conversion says nothing, and lacks the ranges that exponents need.
    """
    package = model.ask(_package_of)
    if package is None:
        return options
    folder, kind = package
    if options.dtype not in kind.dtypes:
        return options
    if previews:
        adapted = kind.adapted(options, chosen_options(), model)
        return replace(adapted, rescale=options.rescale)
    if not given.quiet:
        here = Path.cwd()
        folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
        text = (
            f"This model is in a folder for {kind.name}, so it gets the types that are usual there."
            f" 'onnxamp convert {folder} -o OUTDIR' also copies configs and tokenizers."
        )
        click.echo(printable(text), err=True)
    return kind.adapted(options, chosen_options(), model)


def limits_in_its_folder(model: Model) -> Mapping[str, Mapping[str, float]]:
    """Return the limits that suffice for a model of such a folder, by metric and output."""
    package = model.ask(_package_of)
    return {} if package is None else package[1].limits_of(model)


def _package_of(model: Model) -> tuple[Path, FolderKind] | None:
    """Return the folder of a known kind that a model is in, and the kind."""
    path = model.path
    offer = extensions("folders")["packages"]
    if path is None or is_remote(path) or not offer.is_near(path):
        return None
    package: tuple[Path, FolderKind] | None = offer.load().package_of(path)
    return package


def random_run_options(given: Given) -> RunOptions:
    """Return how models run on random inputs, as far as models and folders have the same options for it."""
    return RunOptions(
        count=given.count, seed=given.seed, dims=given.dims, provider=given.provider
    )


def run_options_of(given: Given, report: Report = silent) -> RunOptions:
    """Return how models run, as the options of a command ask for it.

    Raises:
        ArgumentError: the inputs cannot be read, or options for random ones are given as well.
    """
    return replace(
        random_run_options(given),
        samples=given_prompts(given) or given_samples(given),
        place=place_of(given),
        state=given.state,
        report=report,
        budget=getattr(given, "budget", BUDGET),
    )
