"""One model of a folder: converted, compared with its original and, if that fails, cured. Runs in a worker process."""

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import ModelProto

from onnxamp._batch.state import Row, Stamp, stamps
from onnxamp._convert.convert import Conversion, Sink, convert_to_file
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._model.storage import data_files, folder_of, load_model
from onnxamp._numerics.cure import Recipe, Trial, cure_conversion
from onnxamp._numerics.diff import diff_models
from onnxamp._options.options import Level, Options
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Samples, load_samples, random_samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.shell import take_weights
from onnxamp._tuning.tune import Search, tune


@dataclass(frozen=True, slots=True)
class Order:
    """What is done with every model of a folder: ``cures`` tells whether to look for cures of failures."""

    options: Options = field(default_factory=Options)
    external_data: str = "auto"
    shard_bytes: int | None = None
    tolerance: float = 1e-2
    metric: str = "rel-l2"
    validate: bool = True
    samples: int = 1
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    provider: Provider | None = None
    cures: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One model: its name, where it is, where its result goes, its inputs, and the folder that remembers."""

    name: str
    source: Path
    target: Path
    inputs: Path | None
    home: Path


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a job, and which files it read and wrote."""

    row: Row
    read: Mapping[str, Stamp] = field(default_factory=dict)
    written: Mapping[str, Stamp] = field(default_factory=dict)


def run_job(order: Order, job: Job) -> Done:
    """Do it. Whatever goes wrong is told in the row."""
    start = time.perf_counter()
    try:
        done = _run(order, job)
    except OnnxAmpError as error:
        done = Done(Row(job.name, message=str(error)))
    except Exception as error:  # noqa: BLE001 - no model may end the others
        done = Done(Row(job.name, message=f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
    return replace(done, row=replace(done.row, seconds=time.perf_counter() - start))


def _run(order: Order, job: Job) -> Done:
    model = Model.read(job.source)
    read = stamps({job.source, *model.stock.files, *_files(job.inputs)}, job.home)
    auto = order.options.level == Level.AUTO
    samples = _samples(order, job, model) if auto or order.validate else None
    job.target.parent.mkdir(parents=True, exist_ok=True)
    options, plan, sink = order.options, None, Sink(job.target, order.external_data, order.shard_bytes)
    if auto:
        plan = tune(model, options, Search(order.tolerance, order.metric, samples))[1].plan
    made = convert_to_file(model, sink, plan.options if plan else options, plan)
    row = _row(job.name, made)
    if samples is not None:
        row = replace(row, inputs=samples.description)
        if order.validate:
            row = _validated(row, order, job, model, samples)
    written = stamps({job.target, *data_files(load_model(job.target), folder_of(job.target))}, job.home)
    return Done(row, read, written)


def _files(inputs: Path | None) -> list[Path]:
    """The files that inputs come from."""
    if inputs is None:
        return []
    return [path for path in inputs.iterdir() if path.is_file()] if inputs.is_dir() else [inputs]


def _samples(order: Order, job: Job, model: Model) -> Samples:
    """The model's own inputs, or made-up ones; a size that is asked for counts where the model has that dimension.

    Raises:
        ArgumentError: the inputs cannot be read or do not fit.
    """
    proto = take_weights(model.proto, model.folder, keep=0).model  # samples must not hold weights
    if job.inputs is not None:
        samples = load_samples(job.inputs)
        check_inputs(proto, samples[0])
        return samples
    return random_samples(proto, order.samples, seed=order.seed, dims=_dims(order, proto))


def _dims(order: Order, model: ModelProto) -> dict[str, int]:
    """The sizes that are asked for, of dimensions that the model's inputs have."""
    shapes = [entry.type.tensor_type.shape for entry in model.graph.input]
    named = {dim.dim_param for shape in shapes for dim in shape.dim}
    return {name: size for name, size in order.dims.items() if name in named}


def _sampling(order: Order, job: Job, model: Model) -> tuple[str, ...]:
    """What makes the command line run the model on the same inputs."""
    if job.inputs is not None:
        return "--inputs", str(job.inputs)
    numbers = [("--samples", order.samples, 1), ("--seed", order.seed, 0)]
    written = [text for name, value, default in numbers if value != default for text in (name, str(value))]
    dims = _dims(order, model.proto) if order.dims else {}
    return *written, *(text for name, size in dims.items() for text in ("--dim", f"{name}={size}"))


def _row(name: str, made: Conversion) -> Row:
    nodes = made.summary.nodes
    return Row(
        name, "converted", nodes.get("low", 0) + nodes.get("mixed", 0), sum(nodes.values()), made.summary.casts_added,
        bytes_before=made.bytes_before, bytes_after=made.bytes_after,
    )  # fmt: skip


def _validated(row: Row, order: Order, job: Job, model: Model, samples: Samples) -> Row:
    found = diff_models(model, Model.read(job.target, model), samples, provider=order.provider)
    worst = max((diff.rel_l2 for diff in found.outputs if diff.is_float), default=None)
    row = replace(row, error=worst, message=found.skipped or "")
    if found.passed or found.skipped:
        return row
    why = found.failure or next(iter(found.warnings), "it is beyond its limits.")
    row = replace(row, outcome="failed", message=f"It was written, but failed its validation: {why}")
    if not order.cures:
        return row
    recipe = Recipe(replace(order.options, hazards=True), _sampling(order, job, model))
    command, tried = (str(job.source), str(job.target)), order.options.hazards
    cure = cure_conversion(model, command, recipe, Trial(samples, provider=order.provider), tried=tried)
    return replace(row, cure=cure.command)
