"""``onnxamp train``."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import click
import numpy as np

from onnxamp._base.errors import ArgumentError, RuntimeFailure, suggestion
from onnxamp._cli.common import Given, show
from onnxamp._cli.outputs import check_outputs
from onnxamp._facts.dtypes import low_type
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import INLINE_LIMIT, Model, weight_bytes
from onnxamp._model.saving import save_model
from onnxamp._model.sources import confirm_sources, release_sources
from onnxamp._report import parts
from onnxamp._runtime.inputs.sample_files import read_npz
from onnxamp.train import (
    FROM_LEVEL,
    Batches,
    DynamicLossScaleManager,
    FixedLossScaleManager,
    StepResult,
    TrainNetwork,
    build_train_network,
)
from onnxamp.train._losses import LOSSES
from onnxamp.train._network import require_safetensors
from onnxamp.train._optimizers import OPTIMIZERS

_OWN_LOSS: Final = "model"
_EPOCH: Final = ("epoch", "loss", "gradient norm", "loss scale", "skipped updates")
"""The facts of an epoch."""


def run(given: Given) -> None:
    """Run ``onnxamp train``."""
    if given.checkpoint:
        require_safetensors()
    opened = Model.of(given.model)
    check_outputs(given, [given.output, given.checkpoint], *opened.files)
    batches = Batches(read_npz(given.data), given.batch_size, given.seed)
    net = _network(opened, batches, given)
    confirm_sources()
    release_sources()  # everything that training needs of the model is in memory
    if given.checkpoint and given.checkpoint.exists():
        net.load(given.checkpoint)
    rows = _fit(net, batches, given)
    trained = net.export()
    converter = WeightConverter(low_type(given.dtype), None)  # converts nothing
    save_model(
        trained, given.output, converter, external=weight_bytes(trained) > INLINE_LIMIT
    )
    files = str(given.model), str(given.output)
    low = "" if given.level == "O0" else f" {given.dtype}"
    how = f"{given.level}{low} with {given.optimizer} on {net.runs_on}"
    sentence = f"Trained {given.model.name} at {how}, {len(net.plan.weights)} weights."
    show(
        given,
        partial(_report, files, sentence, rows),
        "train",
        lambda: {
            "source": files[0],
            "target": files[1],
            "epochs": [dict(zip(_EPOCH, row, strict=True)) for row in rows],
        },
    )


def _report(
    files: tuple[str, ...], sentence: str, rows: Sequence[tuple[float, ...]]
) -> parts.Report:
    """Return the summary of a training."""
    cells = (
        (f"{epoch:.0f}", f"{loss:.4f}", f"{norm:.3g}", f"{scale:g}", f"{skipped:.0f}")
        for epoch, loss, norm, scale, skipped in rows
    )
    figures = []
    if rows:
        last = f"{rows[-1][1]:.4f}"
        figures.append(parts.Figure("loss", last, "last epoch", f"loss {last}"))
    return parts.Report(
        "train",
        parts.Headline(parts.Status.PASSED, sentence),
        files,
        figures=tuple(figures),
        sections=(parts.section("Epochs", [parts.table("epochs", cells)]),),
    )


def _fit(net: TrainNetwork, batches: Batches, given: Given) -> list[tuple[float, ...]]:
    """Train for the epochs that are left; returns one row per epoch.

    Raises:
        RuntimeFailure: no update was made, or weights are no longer numbers.
    """
    before = net.steps
    first = before // len(batches)
    results: list[StepResult] = []
    rows: list[tuple[float, ...]] = []

    def note(_: int, result: StepResult) -> None:
        results.append(result)
        if len(results) == len(batches):
            rows.append(_row(net, first + len(rows) + 1, results))
            results.clear()
            # A checkpoint of weights that are lost would only lose the last good one.
            _check_weights(net)
            if given.checkpoint:
                net.save(given.checkpoint)

    net.fit(
        batches.after(first),
        max(given.epochs - first, 0),
        progress=not given.quiet,
        report=note,
    )
    steps = net.steps - before
    every = net.optimizer.accumulate
    updates = net.steps // every - before // every
    if steps and not updates:
        raise RuntimeFailure(
            f"No update was made: {steps} steps are fewer than the {every} of --accumulate."
        )
    if updates and updates == sum(row[-1] for row in rows):
        raise RuntimeFailure(
            f"All {updates} updates were skipped because gradients overflowed: train for longer, so that the loss scale"
            " can fall, or start with a smaller one (--loss-scale dynamic:1024)."
        )
    return rows


def _check_weights(net: TrainNetwork) -> None:
    """Check that all weights are numbers.

    Raises:
        RuntimeFailure: one is NaN or infinite.
    """
    state = net.state()
    lost = [name for name in net.plan.weights if not np.isfinite(state[name]).all()]
    if lost:
        raise RuntimeFailure(
            f"The weights became NaN or infinite, such as {lost[0]!r}: look for such numbers in the data, or lower --lr."
        )


def _row(
    net: TrainNetwork, epoch: int, results: Sequence[StepResult]
) -> tuple[float, ...]:
    """Return the facts of an epoch, in the order of ``_EPOCH``."""
    loss = float(np.mean([np.mean(result.loss) for result in results]))
    scaling = net.scale.scaling
    may_skip = scaling is not None and scaling.skips
    # Only a step that ends an update can be skipped, and only an overflow in that step skips it.
    every = net.optimizer.accumulate
    first = net.steps - len(results)
    due = [one for at, one in enumerate(results, first + 1) if at % every == 0]
    skipped = sum(result.overflow for result in due) if may_skip else 0
    return epoch, loss, results[-1].grad_norm, results[-1].scale, skipped


def _network(model: Model, batches: Batches, given: Given) -> TrainNetwork:
    """Return the network that the options describe.

    Raises:
        ArgumentError: the data lack an input of the model, or contain an unknown one, or a pattern matches no weight.
    """
    decay = {} if given.weight_decay is None else {"weight_decay": given.weight_decay}
    optimizer = OPTIMIZERS[given.optimizer](
        learning_rate=given.lr,
        clip_norm=given.clip_norm,
        accumulate=given.accumulate,
        weights=given.weights,
        **decay,
    )
    loss = None
    if given.loss != _OWN_LOSS:
        loss = replace(LOSSES[given.loss], label=given.label, output=given.of)
    net = build_train_network(
        model.embedded(),
        optimizer,
        loss,
        given.level,
        given.boost_level,
        cast_model_type=given.cast_model_type,
        keep_batchnorm_fp32=given.keep_batchnorm_fp32,
        loss_scale_manager=given.scale,
        dtype=given.dtype,
        provider=given.provider,
        seed=given.seed,
    )
    for pattern in given.weights:
        if not any(re.fullmatch(pattern, name) for name in net.plan.weights):
            near = suggestion(
                (tensor.name for tensor in model.proto.graph.initializer), pattern
            )
            raise ArgumentError(
                f"--weights {pattern!r} matches no weight that can be trained.{near}"
            )
    if wrong := set(net.plan.data) ^ set(batches.arrays):
        raise ArgumentError(
            f"The data hold {', '.join(batches.arrays)}; training needs {', '.join(net.plan.data)}: {min(wrong)!r} is"
            " missing or unknown."
        )
    return net


def loss_scale(text: str) -> object:
    """Return the manager that ``--loss-scale`` spells.

    Raises:
        click.BadParameter: it spells none.
    """
    if text in ("", "none"):
        return None if text else FROM_LEVEL
    kind, *number = text.split(":", 1)
    managers = {"fixed": FixedLossScaleManager, "dynamic": DynamicLossScaleManager}
    try:
        return managers[kind](*map(float, number))
    except (KeyError, ValueError) as error:
        why = f": {error}" if isinstance(error, ArgumentError) else ""
        raise click.BadParameter(
            f"{text!r} is not a loss scale{why}; write fixed:128, dynamic:65536 or none."
        ) from None
