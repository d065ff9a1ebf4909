"""Options that commands share, as arguments of the library."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from onnxamp._cli.common import Given
from onnxamp._cli.options import DataOption
from onnxamp._errors import ArgumentError, printable
from onnxamp._job.writing import Sink
from onnxamp._model.model import Model
from onnxamp._ops.targets import device_of
from onnxamp._options.command_line import spelled_fields
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._paths.paths import is_remote
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.run import Report, RunOptions, silent
from onnxamp._target.targets import targets
from onnxamp._workers.place import Place

if TYPE_CHECKING:
    from onnxamp._batch.kinds import Package
    from onnxamp._runtime.prompts import Prompts
    from onnxamp._runtime.samples import Samples

# --- where and on what models run ---------------------------------------------------------------------------------


def typed_options() -> frozenset[str]:
    """Return the names of the options that the command line spells."""
    context = click.get_current_context()
    return frozenset(
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )


def flag_of(name: str) -> str:
    """Return the flag of an option of this command, as in "--save-plan"."""
    options = click.get_current_context().command.params
    return next(item.opts[0] for item in options if item.name == name)


def target_of_engine(given: Given, target: str) -> str:
    """Return the target of the engine of ``--provider``, unless another one was requested; ``target`` if it has
    none.
    """
    from onnxamp._runtime.session import BROWSER, is_plugin  # noqa: PLC0415 - only what runs models needs it

    engine = (given.provider or "cpu").partition(":")[0]
    engine = _OF_BROWSER if engine == BROWSER else engine
    asked = "target" in typed_options()
    own = engine == _OF_BROWSER or (is_plugin(engine) and engine in targets())
    return target if asked or not own or device_of(target) == engine else engine


_OF_BROWSER: Final = "webgpu"
"""The engine that runs models in a browser."""


def unlike_target(given: Given, target: str) -> list[str]:
    """Return a warning if the engine of ``--provider`` has a target of its own, and no other one was requested."""
    engine = target_of_engine(given, target)
    if engine == target:
        return []
    return [
        f"Converted for {target}, but validated on {engine}: --target {engine} converts for its kernels and arithmetic."
    ]


def _changed(given: Given) -> dict[str, Any]:
    """Return the options for random inputs that differ from their defaults."""
    options = click.get_current_context().command.params
    defaults = {
        item.name: item.row.default
        for item in options
        if isinstance(item, DataOption) and item.name in ("samples", "seed")
    }
    values = {name: getattr(given, name) for name in defaults}
    return {name: now for name, now in values.items() if now != defaults[name]}


def sampling_arguments(given: Given) -> tuple[str, ...]:
    """Return the arguments with which another command runs on the same inputs and judges in the same way."""
    accept = getattr(given, "accept", None)
    judge = (*(("--accept", accept.name) if accept else ()), *custom_arguments(given))
    if given.inputs:
        return "--inputs", str(given.inputs), *judge
    if getattr(given, "prompts", None):
        judge = ("--prompts", str(given.prompts), *judge)
    dims = [
        text
        for name, size in given.dims.items()
        for text in ("--dim", f"{name}={size}")
    ]
    random = (
        text
        for name, value in _changed(given).items()
        for text in (f"--{name}", str(value))
    )
    return *dims, *random, *judge


def custom_arguments(given: Given) -> tuple[str, ...]:
    """Return the arguments with which another command recognizes and runs the same custom ops."""
    declared = ("--custom-ops", str(given.custom_ops)) if given.custom_ops else ()
    libraries = (
        text for path in given.libraries for text in ("--custom-ops-library", str(path))
    )
    return *declared, *libraries


def given_samples(given: Given) -> "Samples | None":
    """Return the samples in the file or folder that ``--inputs`` names; None without it.

    Raises:
        ArgumentError: they cannot be read, or options for random inputs are also given.
    """
    if not given.inputs:
        return None
    if given.dims or _changed(given):
        raise ArgumentError(
            "--inputs replaces random inputs, so --samples, --dim and --seed have no effect."
        )
    from onnxamp._runtime.samples import load_samples  # noqa: PLC0415 - only what runs models needs it

    return load_samples(given.inputs)


def given_prompts(given: Given) -> "Prompts | None":
    """Return the prompts that ``--prompts`` names; None without it.

    Raises:
        ArgumentError: ``--inputs`` is also given.
    """
    path = getattr(given, "prompts", None)
    if path is None:
        return None
    if given.inputs:
        raise ArgumentError(
            "--inputs and --prompts both supply inputs: drop one of the two."
        )
    from onnxamp._runtime.prompts import Prompts  # noqa: PLC0415 - few commands take prompts

    return Prompts(path)


def check_dims(model: Model, given: Given) -> None:
    """Check the names of ``--dim`` if no sample does.

    Raises:
        ArgumentError: the model has no such dimension.
    """
    if given.dims:
        from onnxamp._runtime.sizes import Sizes  # noqa: PLC0415 - few commands are given sizes

        Sizes.of(model.proto.graph.input).resolve(given.dims)


# --- what is written and printed ----------------------------------------------------------------------------------


def sink_of(given: Given, target: Path) -> Sink:
    """Return where a converted model goes, and how."""
    names = given.data_names or "onnx"
    return Sink(target, given.external_data, given.shard_size, names)


# --- conversion ---------------------------------------------------------------------------------------------------


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
    """The options of the conversion that were typed, or stand in a preset or the environment."""
    context = click.get_current_context()
    return frozenset(
        name
        for name in spelled_fields()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    )


def in_its_folder(given: Given, options: Options, model: Model) -> Options:
    """Return the options for a model, with the types that the software expects if the kind of its folder is known.

    That is said, unless the command is quiet: converting the folder does more.
    """
    package = model.ask(_package_of)
    if package is None or options.dtype not in package.kind.dtypes:
        return options
    if not given.quiet:
        folder, here = package.folder, Path.cwd()
        folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
        text = (
            f"This model is in a folder for {package.kind.name}, so it gets the types that are usual there."
            f" 'onnxamp convert {folder} -o OUTDIR' also copies configs and tokenizers."
        )
        click.echo(printable(text), err=True)
    return package.kind.adapted(options, chosen_options(), model)


def limits_in_its_folder(model: Model) -> Mapping[str, Mapping[str, float]]:
    """Return the limits that suffice for a model of such a folder, by metric and output."""
    package = model.ask(_package_of)
    return {} if package is None else package.kind.limits_of(model)


def _package_of(model: Model) -> "Package | None":
    """Return the folder of a known kind that a model is in."""
    from onnxamp._batch.kinds import Packages  # noqa: PLC0415 - few commands write models

    path = model.path
    if path is None or is_remote(path):
        return None
    return Packages(path.absolute().parent.parent).of(path.absolute())


def run_options_of(given: Given, report: Report = silent) -> RunOptions:
    """Return how models run, as the options of a command ask for it.

    Raises:
        ArgumentError: the inputs cannot be read, or options for random ones are given as well.
    """
    return RunOptions(
        samples=given_prompts(given) or given_samples(given),
        count=given.samples,
        seed=given.seed,
        dims=given.dims,
        provider=given.provider,
        place=place_of(given),
        state=given.state,
        report=report,
        budget=getattr(given, "budget", BUDGET),
    )
