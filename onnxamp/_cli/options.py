"""The groups of options that commands share, and what they mean to the library."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
from click.core import ParameterSource

from onnxamp._cli.common import (
    FILE,
    Decorator,
    Given,
    LevelChoice,
    OutputPath,
    Words,
    option,
    refused,
    to_opset,
    to_target,
)
from onnxamp._errors import ArgumentError
from onnxamp._job.writing import Sink
from onnxamp._model.model import Model
from onnxamp._ops.targets import device_of, read_table
from onnxamp._options.levels import DiffMetric, Level
from onnxamp._options.options import COMMAND_LINE, CommandLine, Options, default_of
from onnxamp._runtime.defaults import BUDGET, CURE_SECONDS, LEAST, MOST
from onnxamp._runtime.run import Report, RunOptions, silent
from onnxamp._target.targets import targets
from onnxamp._workers.place import Place

if TYPE_CHECKING:
    from onnxamp._numerics.limits import Accept
    from onnxamp._runtime.samples import Samples
    from onnxamp._runtime.session import Provider

FORMATS: Final = ("line", "table", "json", "markdown")
"""How commands print what they report."""


model_argument: Final = click.argument("model", type=FILE)


def option_group(*options: Decorator) -> Decorator:
    """One decorator that adds several options, listed by ``--help`` in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for add in reversed(options):
            function = add(function)
        return function

    return decorate


result_options: Final = option_group(
    option(
        "-o",
        "--output",
        type=OutputPath(path_type=Path, readable=False),
        help="Where to write the result; FOLDER/ makes a folder for it [MODEL_fp16.onnx or MODEL_bf16.onnx].",
    ),
    option("--in-place", is_flag=True, help="Let the result replace MODEL itself."),
)
"""The options that say where a converted model goes."""


def _bytes(value: str) -> int:
    """A size in bytes, given with or without a unit: 500MB, 2GB, 1.5GiB."""
    size = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?) *(?:([kmgt])(i?)b?|b)?", value.strip().lower()
    )
    if size is None:
        raise click.BadParameter(
            f"{value!r} is not a size: write it like 500MB or 2GB."
        )
    if not float(size[1]):
        raise click.BadParameter(
            f"{value!r} holds nothing: give a size like 500MB or 2GB."
        )
    unit: int = (1024 if size[3] else 1000) ** " kmgt".index(size[2] or " ")
    return round(float(size[1]) * unit)


def _dims(
    _: click.Context, __: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, int]:
    """``NAME=N`` options as a mapping."""
    dims = {}
    for pair in pairs:
        name, _equals, number = pair.rpartition("=")
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{pair!r} is not of the form NAME=N.")
        if int(number) == 0:
            raise click.BadParameter(
                f"{pair!r} would make empty inputs, which show nothing."
            )
        dims[name] = int(number)
    return dims


# --- where and on what models run ---------------------------------------------------------------------------------


def target_of_engine(given: Given, target: str) -> str:
    """The target of the engine of ``--provider``, where nobody asked for another; ``target`` if it has none."""
    from onnxamp._runtime.session import BROWSER, is_plugin  # noqa: PLC0415 - only what runs models needs it

    engine = (given.provider or "cpu").partition(":")[0]
    engine = _OF_BROWSER if engine == BROWSER else engine
    asked = (
        click.get_current_context().get_parameter_source("target")
        is ParameterSource.COMMANDLINE
    )
    own = engine == _OF_BROWSER or (is_plugin(engine) and engine in targets())
    return target if asked or not own or device_of(target) == engine else engine


_OF_BROWSER: Final = "webgpu"
"""What runs models in a browser."""


def unlike_target(given: Given, target: str) -> list[str]:
    """A warning where the engine of ``--provider`` has a target of its own, and nobody asked for another one."""
    engine = target_of_engine(given, target)
    if engine == target:
        return []
    return [
        f"Made for {target}, and judged on {engine}: --target {engine} converts for what it has and how it computes."
    ]


def cure_options(no_cure: str, more: str = "") -> Decorator:
    """The options that leave out the search for options that fix a failure, and that limit it."""
    return option_group(
        option("--no-cure", is_flag=True, help=no_cure),
        option(
            "--cure-time",
            metavar="SECONDS",
            type=click.FloatRange(0),
            default=CURE_SECONDS,
            help=f"Time in which nodes are looked for that must stay float32 to pass{more}.",
        ),
    )


def judged_target_option(text: str) -> Decorator:
    """The option that says whose arithmetic counts."""
    metavar = COMMAND_LINE["target"].metavar
    return option(
        "--target", type=to_target, default="cuda", metavar=metavar, help=text
    )


def budget_option(default: int, text: str) -> Decorator:
    """The option that bounds memory, given in MB; ``default`` is in bytes."""
    return option(
        "--budget",
        metavar="MB",
        type=click.IntRange(1),
        default=default >> 20,
        callback=lambda _, __, megabytes: megabytes << 20,
        help=text,
    )


def level_option(text: str, levels: Iterable[str]) -> Decorator:
    """The option that names a level."""
    return option("--level", type=LevelChoice(levels), default="O2", help=text)


def _provider(text: str) -> "Provider | None":
    """The provider that is asked for; None for "auto"."""
    return None if text.lower() == "auto" else text.lower()


provider_option: Final = option(
    "--provider",
    default="auto",
    type=_provider,
    metavar="auto|cuda|cpu|webgpu|browser|PACKAGE",
    help="Where to run models; auto uses CUDA if it is available, PACKAGE is a plugin provider of ONNX Runtime, such as"
    " onnxruntime-ep-openvino; browser, for bench and diff, is a headless Chromium with onnxruntime-web.",
)
"""The option that says where models run."""


library_option: Final = option(
    "--custom-ops-library",
    "libraries",
    type=FILE,
    metavar="FILE",
    multiple=True,
    help="A shared library with kernels of custom ops, for ONNX Runtime. Its code runs as you: name only libraries that"
    " you trust. Repeatable.",
)
"""The option that registers custom ops with what runs."""


def run_options(count: int | None = 1, *, judges: bool = False) -> Decorator:
    """The options that say on which inputs and where models run.

    ``count`` is the default of ``--samples``; None leaves the option out. What ``judges`` takes as many as
    :func:`onnxamp._runtime.draws.usual_count` says.
    """
    inputs = (
        "An .npz file, a folder of them, or Polygraphy's JSON. Default: random inputs."
    )
    usual = (
        f" [1; {LEAST} to {MOST} where float16 is summed up in float16, as on webgpu]"
        if judges
        else ""
    )
    samples = option(
        "--samples",
        type=click.IntRange(1),
        default=None if judges else count,
        show_default=not judges,
        help=f"Number of random inputs{usual}.",
    )
    return option_group(
        option("--inputs", type=FILE, metavar="PATH", help=inputs),
        *([samples] if count is not None else []),
        option(
            "--dim",
            "dims",
            metavar="NAME=N",
            multiple=True,
            callback=_dims,
            help="Size of a dynamic dimension of random inputs, by name or INPUT[AXIS]. Repeatable.",
        ),
        option(
            "--seed",
            type=click.IntRange(0),
            default=0,
            help="Seed of random inputs.",
        ),
        provider_option,
        library_option,
    )


custom_ops_option: Final = option(
    "--custom-ops",
    metavar=COMMAND_LINE["custom_ops"].metavar,
    help=COMMAND_LINE["custom_ops"].help,
)
"""The declaration of custom ops, for commands that do not convert."""


def _changed(given: Given) -> dict[str, Any]:
    """The options for random inputs that differ from their defaults."""
    every = click.get_current_context().command.params
    random = [
        (item.name, item.default) for item in every if item.name in ("samples", "seed")
    ]
    return {
        name: now
        for name, default in random
        if (now := getattr(given, name)) != default
    }


def sampling_arguments(given: Given) -> tuple[str, ...]:
    """The arguments that make another command run on the same inputs, and judge alike."""
    accept = getattr(given, "accept", None)
    judge = (*(("--accept", accept.name) if accept else ()), *custom_arguments(given))
    if given.inputs:
        return "--inputs", str(given.inputs), *judge
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
    """The arguments that let another command know and run the same custom ops."""
    declared = ("--custom-ops", str(given.custom_ops)) if given.custom_ops else ()
    libraries = (
        text for path in given.libraries for text in ("--custom-ops-library", str(path))
    )
    return *declared, *libraries


def given_samples(given: Given) -> "Samples | None":
    """The samples in the file or folder that ``--inputs`` names; None without it.

    Raises:
        ArgumentError: they cannot be read, or options for random inputs are given, too.
    """
    if not given.inputs:
        return None
    if given.dims or _changed(given):
        raise ArgumentError(
            "--inputs replaces random inputs: --samples, --dim and --seed have no effect with it."
        )
    from onnxamp._runtime.samples import load_samples  # noqa: PLC0415 - only what runs models needs it

    return load_samples(given.inputs)


def check_dims(model: Model, given: Given) -> None:
    """Check the names of ``--dim`` where no sample does.

    Raises:
        ArgumentError: the model has no such dimension.
    """
    if given.dims:
        from onnxamp._runtime.sizes import Sizes  # noqa: PLC0415 - few commands are given sizes

        Sizes.of(model.proto.graph.input).resolve(given.dims)


# --- what is written and printed ----------------------------------------------------------------------------------


metric_option: Final = option(
    "--metric",
    type=click.Choice(get_args(DiffMetric)),
    default="auto",
    help="Whether to match detections before they are compared, or to compare all elements in place; auto matches rows"
    " that an op selected.",
)
"""The option that says how outputs are compared."""


def _accept(name: str) -> "Accept":
    """The function of a name, imported before anything runs."""
    if ":" not in name:
        raise click.BadParameter(f"{name!r} is not of the form PACKAGE:FUNCTION.")
    from onnxamp._numerics.limits import Accept  # noqa: PLC0415 - few commands are given a judge

    with refused():
        return Accept.of(name)


accept_option: Final = option(
    "--accept",
    metavar="PACKAGE:FUNCTION",
    type=_accept,
    help="Let this function judge: it takes the outputs of the original and of the result as dicts of arrays, and"
    " returns True or False. FILE.py:FUNCTION works, too. Its module runs as you: name only code that you trust.",
)
"""The option that lets a function of the user judge outputs."""


state_option: Final = option(
    "--state",
    type=FILE,
    metavar="FILE",
    help="Keep in this file what was done, at once: an interrupted run goes on from there, and nothing is done twice.",
)
"""The option that names a state file."""


def format_option(what: str) -> Decorator:
    """The option that says how ``what`` is printed."""
    return option(
        "--format",
        type=click.Choice(FORMATS),
        default="table",
        help=f"How to print the {what}: in one line if all is well, as tables, as JSON, or as Markdown.",
    )


def report_options(
    what: str,
    details: str,
    *,
    silent: str = "Print nothing but warnings and errors.",
    html: bool = False,
) -> Decorator:
    """Options that say how to print ``what``, or not at all, with ``details``, and with ``html`` as a page."""
    page = option("--html", type=FILE, help=f"Write the {what} as one HTML page.")
    return option_group(
        *([page] if html else []),
        format_option(what),
        option("-q", "--quiet", is_flag=True, help=silent),
        option(
            "-v",
            "--verbose",
            is_flag=True,
            help=f"Print every {details}; show tracebacks.",
        ),
    )


_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = read_table("presets")


def _apply(context: click.Context, _: click.Parameter, preset: str | None) -> None:
    """Make the options of a preset the defaults; it is read before the others."""
    if preset is not None:
        context.default_map = {
            **(context.default_map or {}),
            **_PRESETS[preset]["options"],
        }


output_options: Final = option_group(
    option(
        "--save-plan", type=FILE, help="Write every decision and its reason as JSON."
    ),
    option(
        "--external-data",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="Whether to store weights in a data file beside the model.",
    ),
    option(
        "--shard-size",
        metavar="SIZE",
        type=_bytes,
        help="Split the data file into files of about this size (2GB, 500MB).",
    ),
    report_options("report", "verdict", html=True),
    option(
        "--preset",
        type=click.Choice([name for name, row in _PRESETS.items() if row["options"]]),
        is_eager=True,
        expose_value=False,
        callback=_apply,
        help="Options for other software; those that are given replace them. transformers.js: "
        + _PRESETS["transformers.js"]["summary"]
        + ".",
    ),
    option(
        "--data-names",
        type=click.Choice(list(_PRESETS)),
        help="Whose names data files get: NAME.data of onnx, the default, or NAME_data of transformers.js.",
    ),
)
"""The options of commands that write a converted model."""


def sink_of(
    given: Given, target: Path, approve: Callable[[Path], None] | None = None
) -> Sink:
    """Return where a converted model goes, and how."""
    names = given.data_names or "onnx"
    return Sink(target, given.external_data, given.shard_size, names, approve)


# --- conversion ---------------------------------------------------------------------------------------------------


def _conversion_option(name: str, spelled: CommandLine) -> Decorator:
    default = default_of(name)
    form: dict[str, Any]
    if spelled.words is not None:
        word = next(word for word, value in spelled.words.items() if value == default)
        form = {"type": Words(spelled.words, spelled.named), "default": word}
    elif "/" in spelled.flag or isinstance(default, bool):
        form = {"default": default, "show_default": False}
        if "/" not in spelled.flag:
            form["flag_value"] = not default
    elif spelled.many:
        form = {"multiple": True}
    else:
        own = {"opset": to_opset, "target": to_target}
        kind = click.IntRange(1) if spelled.kind is int else spelled.kind
        form = {
            "type": own.get(name, kind),
            "default": None if default == () else default,
        }
    return option(
        spelled.flag, name, metavar=spelled.metavar, help=spelled.help, **form
    )


conversion_options: Final = option_group(
    *(_conversion_option(*item) for item in COMMAND_LINE.items())
)
"""An option for each field of :class:`Options` that the command line can spell."""


def options_of(given: Given, level: str | None = None) -> Options:
    """The :class:`Options` that the command line spells, at ``level`` or the one that is given.

    They are strict about names that match nothing.

    Raises:
        ArgumentError, ContradictionError: a value is wrong.
    """
    keywords: dict[str, Any] = {"strict_options": True}
    for name, spelled in COMMAND_LINE.items():
        keywords[name] = spelled.meaning(getattr(given, name))
    return Options.of(level or str(getattr(given, "level", Level.O2)), keywords)


place_options: Final = option_group(
    option(
        "--jobs",
        metavar="N",
        type=click.IntRange(1),
        help="Worker processes, for models of a folder, samples and data files [a folder: one per core; else"
        " none].",
    ),
    option(
        "--cluster",
        metavar="local|ADDRESS",
        help="Let the worker processes be those of a Ray cluster; local starts one on this machine.",
    ),
)
"""The options that say which worker processes to use."""


def place_of(given: Given) -> Place:
    """The worker processes that are asked for.

    Raises:
        ArgumentError: a value is wrong.
    """
    return Place(given.jobs, given.cluster)


def run_options_of(given: Given, report: Report = silent) -> RunOptions:
    """Return how models run, as the options of a command ask for it.

    Raises:
        ArgumentError: the inputs cannot be read, or options for random ones are given as well.
    """
    return RunOptions(
        samples=given_samples(given),
        count=given.samples,
        seed=given.seed,
        dims=given.dims,
        provider=given.provider,
        place=place_of(given),
        state=given.state,
        report=report,
        budget=getattr(given, "budget", BUDGET),
    )
