"""What the commands share: options and what they mean, and how errors end."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from onnxamp._convert.convert import Conversion
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError, ArgumentTypeError, OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._numerics.results import DiffReport
from onnxamp._report.text import printable
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Samples, load_samples, random_samples
from onnxamp._runtime.session import Provider

if TYPE_CHECKING:
    from onnxamp._tuning.results import Tuned

F = TypeVar("F", bound=Callable[..., Any])


def as_bytes(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """The number of bytes that an option says, with or without a unit: 500MB, 2GB, 1.5GiB."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *(?:([kmgt])(i?)b?|b)?", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is no size: write it like 500MB or 2GB.", param=parameter)
    unit: int = (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")
    return round(float(found[1]) * unit)


def provider_option(function: F) -> F:
    """Add the option that says where models run."""
    text = "Where models run: auto takes CUDA where it can be used."
    option = click.option("--provider", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
                          help=text)  # fmt: skip
    return option(function)


def provider_of(options: dict[str, Any]) -> Provider | None:
    """The option of :func:`provider_option` as a keyword argument: None where the machine decides."""
    return None if options["provider"] == "auto" else options["provider"]


def sampling(function: F) -> F:
    """Add the options that say on which inputs models run."""
    options = (
        click.option("--inputs", metavar="PATH", help="Inputs: an .npz file, a folder of them, or Polygraphy's JSON."),
        click.option("--samples", type=click.IntRange(1), default=1, show_default=True,
                     help="Number of made-up inputs."),
        click.option("--dim", "dims", metavar="NAME=N", multiple=True,
                     help="Size of a dynamic dimension of made-up inputs. Repeatable."),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of made-up inputs."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def writing(function: F) -> F:
    """Add the options that say where results go and what is printed, of commands that write a model."""
    options = (
        click.option("--save-plan", type=click.Path(path_type=Path),
                     help="Write every decision and its reason as JSON."),
        click.option("--external-data", type=click.Choice(["auto", "always", "never"]), default="auto",
                     show_default=True, help="Whether weights go to a data file beside the model."),
        click.option("--shard-size", metavar="SIZE", callback=as_bytes,
                     help="Split the data file into several of about this size (2GB, 500MB)."),
        click.option("--html", type=click.Path(path_type=Path), help="Write the report as one HTML page."),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        click.option("-v", "--verbose", is_flag=True, help="Print every verdict; show tracebacks."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def target_of(model: Model, options: dict[str, Any], dtype: str, *read: Path | None, also: Path | None = None) -> Path:
    """Where the result goes; nothing that is written may be anything that is read, but for the model itself.

    Raises:
        ArgumentError: see :func:`check_outputs`.
    """
    path = model.path or Path("model.onnx")
    target: Path = options["output"] or path.parent / f"{path.stem}_{low_type(dtype).suffix}.onnx"
    in_place = is_same_file(path, target)
    own = [file for file in files_of(model) if not (in_place and file == path)]
    check_outputs([*read, *own, *given_inputs(options)], [target, options["save_plan"], options["html"], also])
    return target


def is_same_file(model: Path, target: Path) -> bool:
    """Whether the result replaces the model."""
    return target.exists() and model.exists() and target.samefile(model)


def write_page(
    made: Conversion, result: Model, validation: DiffReport | None, path: Path, tuned: "Tuned | None" = None
) -> None:
    """Write the report of a conversion as an HTML page."""
    from onnxamp._audit.audit import audit_model  # noqa: PLC0415 - pages alone show it
    from onnxamp._report.html.page import conversion_page  # noqa: PLC0415 - jinja2 is needed for nothing else
    from onnxamp._report.html.render import write  # noqa: PLC0415

    audit = audit_model(result, made.plan.target)
    write(conversion_page(made, validation, audit, tuned), path)


def sampling_text(options: dict[str, Any]) -> tuple[str, ...]:
    """The options of :func:`sampling` as they were written, for a command that shall run on the same inputs."""
    if options["inputs"]:
        return ("--inputs", str(options["inputs"]))
    written = [text for pair in options["dims"] for text in ("--dim", pair)]
    for name in ("samples", "seed"):
        written += [f"--{name}", str(options[name])] if options[name] != _SAMPLING[name] else []
    return tuple(written)


_SAMPLING: Final = {"samples": 1, "seed": 0}
"""Defaults of the options that make up inputs."""


def samples_of(model: Model, options: dict[str, Any]) -> Samples:
    """The samples that the options of :func:`sampling` ask for; those that do not fit the model are found at once.

    Raises:
        ArgumentError: the inputs cannot be read or do not fit, or there is no such dimension.
    """
    if options["inputs"]:
        if options["dims"] or any(options[name] != default for name, default in _SAMPLING.items()):
            raise ArgumentError("--inputs gives the inputs: --samples, --dim and --seed are for made-up ones.")
        samples = load_samples(options["inputs"])
        check_inputs(model.proto, samples[0])
        return samples
    dims = parse_dims(options["dims"])
    samples = random_samples(model, options["samples"], seed=options["seed"], dims=dims)
    if dims:
        samples[0]
    return samples


def files_of(model: Model) -> list[Path]:
    """A model's file, and those that hold its weights: no output may be written there."""
    return [] if model.path is None else [model.path, *model.stock.files]


def given_inputs(options: dict[str, Any]) -> list[Path]:
    """The file of the inputs that :func:`sampling` names."""
    return [Path(options["inputs"])] if options["inputs"] else []


def check_outputs(inputs: Iterable[Path | None], outputs: Iterable[Path | None]) -> None:
    """Refuse, before anything runs, to write over what is read, or two things to one place.

    Raises:
        ArgumentError: an output is an input or another output, is no file, or its folder is missing or read-only.
    """
    taken = {path.resolve() for path in inputs if path is not None}
    for path in (path for path in outputs if path is not None):
        target, folder = path.resolve(), path.absolute().parent
        if target in taken:
            raise ArgumentError(f"{str(path)!r} is read or written already: give the output another name.")
        if target.is_dir():
            raise ArgumentError(f"The output {str(path)!r} is a folder: name a file.")
        if target.exists() and not target.is_file():
            raise ArgumentError(f"The output {str(path)!r} is no regular file: name another.")
        if not folder.is_dir():
            raise ArgumentError(f"Cannot write {str(path)!r}: the folder {str(folder)!r} does not exist; create it.")
        if not os.access(folder, os.W_OK):
            raise ArgumentError(f"Cannot write {str(path)!r}: the folder {str(folder)!r} is read-only.")
        taken.add(target)


@contextmanager
def errors_end_here(*, verbose: bool) -> Iterator[None]:
    """Show onnxamp's errors as one sentence, and exit with 2 if an option is wrong, else with 1.

    ``verbose`` lets the traceback through.
    """
    try:
        yield
    except OnnxAmpError as error:
        if verbose:
            raise
        kind = click.UsageError if isinstance(error, (ArgumentError, ArgumentTypeError)) else click.ClickException
        raise kind(printable(str(error))) from None


def parse_dims(pairs: tuple[str, ...]) -> dict[str, int]:
    """``NAME=N`` options as a mapping.

    Raises:
        click.BadParameter: one is not of that form.
    """
    dims = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{pair!r} is not of the form NAME=N.", param_hint="--dim")
        dims[name] = int(number)
    return dims
