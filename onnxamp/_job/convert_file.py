"""``onnxamp.convert_file``: conversion to a file, validated before it is in its place."""

from os import PathLike
from typing import TYPE_CHECKING, Unpack

from onnxamp._base.errors import ArgumentTypeError, warn
from onnxamp._base.paths import as_path
from onnxamp._base.place import Place
from onnxamp._convert.plan import Plan
from onnxamp._job import (
    Request,
    Validation,
    samples_of_level,
    search_of,
    validation_metric,
)
from onnxamp._job.pipeline import convert_to_file
from onnxamp._job.writing import Conversion, Sink
from onnxamp._model.model import Model
from onnxamp._model.sources import watched_sources
from onnxamp._options.options import OptionKeywords, Options
from onnxamp._options.values import LevelName, is_auto
from onnxamp._runtime.run import Report, RunOptions, silent

if TYPE_CHECKING:
    from onnxamp._base.state import StateLike
    from onnxamp._runtime.engines import Progress
    from onnxamp._runtime.inputs.samples import SamplesLike
    from onnxamp._runtime.sessions.session import Provider
    from onnxamp._tuning.metric import MetricLike


def _of_writing(progress: "Progress") -> Report:
    """Return a callback that reports only the progress of writing."""

    def report(activity: str, done: int, total: int) -> None:
        if activity == "writing":
            progress(done, total)

    return report


@watched_sources()
def convert_file(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    level: LevelName = "O2",
    *,
    plan: Plan | None = None,
    external_data: str = "auto",
    shard_bytes: int | None = None,
    data_names: str = "onnx",
    progress: "Progress | None" = None,
    tolerance: float | None = None,
    samples: "SamplesLike | None" = None,
    metric: "MetricLike" = "auto",
    validate: bool = True,
    provider: "Provider | None" = None,
    jobs: int | None = None,
    cluster: str | None = None,
    state: "StateLike" = None,
    **options: Unpack[OptionKeywords],
) -> Conversion:
    """Convert a model file of any size, validate the result, and write it whole or not at all.

    Like ``onnxamp convert``, this runs the result next to the original before it writes the file. If the result
    fails, onnxamp searches for nodes that must stay in float32, tries level O1, and writes what passes: in the worst
    case the float32 model. If the original does not run on this machine, onnxamp writes the result without validation.

    Args:
        src: the model. Its external data is memory-mapped and streamed.
        dst: the file to write; an existing file is replaced once the new one is complete.
        level, options: as :func:`convert_model`.
        metric: how the validation compares outputs: "auto", "detections" or "elements", see :func:`diff_models`; and
            how level "auto" measures errors, see :func:`tune_model`.
        tolerance: the largest accepted error. It is the limit of the validation (None for 1e-2 in float16, 5e-2 in
            bfloat16) and the goal of level "auto" (None for 1e-2).
        samples: the inputs on which the models are compared and measured; random ones by default.
        validate: compare the result with the original. False writes it without validation, and runs the model only
            if an option needs measurements.
        provider: where models run, "cuda", "cpu" or a plugin provider; None for CUDA if there is a device.
        plan: repeat the decisions of this plan; its level and options replace those of the call.
        external_data: "auto" (weights go to a data file if those of the source do, or if they exceed 1.9 GB), "always"
            or "never".
        shard_bytes: split the data file into several of about this many bytes.
        data_names: "onnx" (``NAME.data``) or "transformers.js" (``NAME_data``, ``NAME_data_1``, ...).
        progress: called with (bytes written, bytes in total) while weights are written.
        jobs: the number of worker processes that read and write the data files of a large model, and measure ranges on
            samples; None to use this process only.
        cluster: the Ray cluster that the workers belong to: "local" for one on this machine, or an address.
        state: a file that records finished data files and measurements, so that an interrupted
            conversion can resume. Until then, finished files wait in a hidden folder beside ``dst``.

    Returns:
        The plan, a summary of the result, its validation, and the number of elements of each weight that overflowed
        or underflowed. With ``plan``, a result that fails its validation is written to ``NAME.failed.onnx`` instead of
        ``dst``, with a warning.

    Raises:
        OutputError: the target cannot be written. ArgumentError: the state belongs to another conversion. Others as
            :func:`convert_model`.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     conversion = onnxamp.convert_file("models/encoder.onnx", f"{folder}/encoder_fp16.onnx")
        >>> conversion.bytes_after < conversion.bytes_before, conversion.validation.passed
        (True, True)
    """
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentTypeError(f"plan must be a Plan, not {type(plan).__name__}.")
    asked = plan.options if plan else Options.of(level, options)
    if plan is not None and options:
        names = ", ".join(sorted(options))
        warn([f"The plan replaces {names}: these arguments have no effect."])
    if plan is None:
        is_auto(
            level,
            tolerance,
            samples,
            metric,
            measures=asked.takes_samples or validate,
            validates=validate,
        )
    validation = Validation(tolerance=tolerance, metric=validation_metric(metric))
    request = Request(
        model=Model.of(as_path(src)),
        asked=asked,
        plan=plan,
        run=RunOptions(
            samples=samples,
            # A validation draws as many inputs as its verdict takes.
            count=None if validate else samples_of_level(asked),
            provider=provider,
            place=Place(jobs, cluster),
            state=state,
            report=silent if progress is None else _of_writing(progress),
        ),
        search=search_of(tolerance, metric),
        validation=validation if validate else None,
    )
    sink = Sink(as_path(dst), external_data, shard_bytes, data_names)
    conversion = convert_to_file(request, sink).conversion
    if conversion.fault:
        places = f"{conversion.target}, not to {sink.target}"
        warn(
            [
                f"The result failed validation and was written to {places}: {conversion.fault}"
            ]
        )
    return conversion
