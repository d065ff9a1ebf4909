"""``onnxamp train``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from onnxamp._cli.common import check_outputs, files_of, new_command
from onnxamp._cli.options import FILE, model_argument
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._model.saving import WeightConverter, save_model
from onnxamp._model.storage import INLINE_LIMIT, weight_bytes
from onnxamp._report import parts
from onnxamp._report.terminal import print_report
from onnxamp._runtime.sample_files import read_npz
from onnxamp.train import Batches, DynamicLossScaleManager, StepResult, TrainNetwork, build_train_network
from onnxamp.train._levels import LEVELS
from onnxamp.train._losses import LOSSES
from onnxamp.train._optimizers import OPTIMIZERS

_OWN_LOSS = "model"


@new_command("train")
@model_argument
@click.option("--data", type=FILE, required=True,
              help="An .npz file: one array per input of MODEL and the labels, with samples along the first axis."
              )  # fmt: skip
@click.option("-o", "--output", type=FILE, required=True, help="Where to write the trained model.")
@click.option("--loss", type=click.Choice([*LOSSES, _OWN_LOSS]), default="cross-entropy", show_default=True,
              help="The loss to minimize; 'model' if the first output of MODEL is the loss.")  # fmt: skip
@click.option("--label", default="label", show_default=True, metavar="NAME", help="Name of the labels in the data.")
@click.option("--of", metavar="OUTPUT", help="The output that the loss is computed from [the first].")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Learning rate.")
@click.option("--weight-decay", type=float, help="Weight decay [0.01 with adamw, else 0].")
@click.option("--clip-norm", type=float, help="Scale gradients down to this norm.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Batches per update.")
@click.option(
    "--weights", metavar="REGEX", multiple=True, help="Train only weights whose whole name matches. Repeatable."
)
@click.option("--level", type=click.Choice(LEVELS), default="O2", show_default=True, help="Precision of the step.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True,
              help="Low-precision type.")  # fmt: skip
@click.option("--loss-scale", type=float, help="Initial dynamic loss scale [2^24 at O2, else none].")
@click.option("--epochs", type=click.IntRange(1), default=5, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of shuffling and dropout.")
@click.option(
    "--checkpoint", type=FILE, help="Save the state to this file after each epoch; resume from it if it exists."
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
def command(model: Path, **options: Any) -> None:
    """Train MODEL in mixed precision, and write the trained model in float32.

    The level sets the precision of the training step; master weights, loss and update stay float32. Without a CUDA
    device the step runs on the CPU, and low precision is emulated.

    Exit codes: 0 the trained model was written; 1 training failed; 2 wrong usage.
    """
    opened = Model.read(model)
    check_outputs([*files_of(opened), options["data"]], [options["output"], options["checkpoint"]])
    batches = Batches(read_npz(options["data"]), options["batch_size"], options["seed"])
    net = _network(opened, batches, options)
    if options["checkpoint"] and options["checkpoint"].exists():
        net.load(options["checkpoint"])
    rows = _fit(net, batches, options)
    trained = net.export()
    converter = WeightConverter(low_type(options["dtype"]), None)  # converts nothing
    save_model(trained, options["output"], converter, external=weight_bytes(trained) > INLINE_LIMIT)
    if not options["quiet"]:
        columns = ("epoch", "loss", "gradient norm", "loss scale", "skipped updates")
        verdict = parts.Verdict(parts.Status.PASSED, f"Trained {model.name} at {_summary(net, options)}.")
        epochs = parts.section("Epochs", [parts.table(columns, rows, right=range(5))])
        print_report(parts.Report("train", verdict, (str(model), str(options["output"])), sections=(epochs,)))


def _fit(net: TrainNetwork, batches: Batches, options: dict[str, Any]) -> list[tuple[str, ...]]:
    """Train for the epochs that are left; returns one row per epoch.

    Raises:
        RuntimeFailure: no update was made.
    """
    updates = skips = 0
    rows: list[tuple[str, ...]] = []
    for epoch in range(net.steps // len(batches), options["epochs"]):
        results: list[StepResult] = []
        (mean,) = net.fit(
            batches.after(epoch),
            progress=not options["quiet"],
            report=lambda _, result: results.append(result),  # noqa: B023
        )
        last, skipped = results[-1], sum(result.overflow for result in results)
        rows.append((f"{epoch + 1}", f"{mean:.4f}", f"{last.grad_norm:.3g}", f"{last.scale:g}", f"{skipped}"))
        updates, skips = updates + len(results), skips + skipped
        if options["checkpoint"]:
            net.save(options["checkpoint"])
    if updates and updates == skips:
        raise RuntimeFailure(
            f"All {updates} updates were skipped because gradients overflowed: train for longer, so that the loss scale"
            " can fall, or start with a smaller one (--loss-scale)."
        )
    return rows


def _network(model: Model, batches: Batches, options: dict[str, Any]) -> TrainNetwork:
    """The network that the options describe.

    Raises:
        ArgumentError: the data lack an input of the model, or hold an unknown one.
    """
    decay = {} if options["weight_decay"] is None else {"weight_decay": options["weight_decay"]}
    optimizer = OPTIMIZERS[options["optimizer"]](
        learning_rate=options["lr"], clip_norm=options["clip_norm"], accumulate=options["accumulate"],
        weights=options["weights"], **decay,
    )  # fmt: skip
    loss = (
        None
        if options["loss"] == _OWN_LOSS
        else replace(LOSSES[options["loss"]], label=options["label"], output=options["of"])
    )
    scale = DynamicLossScaleManager(options["loss_scale"]) if options["loss_scale"] is not None else None
    net = build_train_network(
        model.embedded(), optimizer, loss, options["level"], loss_scale_manager=scale, dtype=options["dtype"],
        seed=options["seed"],
    )  # fmt: skip
    if wrong := set(net.plan.data) ^ set(batches.arrays):
        raise ArgumentError(
            f"The data hold {', '.join(batches.arrays)}; training needs {', '.join(net.plan.data)}: {min(wrong)!r} is"
            " missing or unknown."
        )
    return net


def _summary(net: TrainNetwork, options: dict[str, Any]) -> str:
    low = "" if options["level"] == "O0" else f" {options['dtype']}"
    return f"{options['level']}{low} with {options['optimizer']} on {net.runs_on}, {len(net.plan.weights)} weights"
