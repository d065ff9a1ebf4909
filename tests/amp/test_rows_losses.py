"""One test per row of "Losses" and "Loss scalers" in docs/coming-from.md."""

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from coming_from import RowTests, rows
from onnx import ModelProto
from train_nets import Array, feeds, make, mlp, network

import onnxamp
from onnxamp import amp
from onnxamp import train as nn
from onnxamp.train import SGD, Loss, TrainNetwork

TESTS = RowTests()
row = TESTS.row
SECTIONS = ("Losses", "Loss scalers")

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((5, 4)).astype(np.float32)
CLASSES = np.array([0, 3, 1, 2, 2])
SOFT = RNG.dirichlet(np.ones(4), 5).astype(np.float32)
WEIGHT = np.array([0.5, 1, 2, 3], np.float32)
LOUD = {**feeds(), "x": feeds()["x"] * np.float32(np.inf)}


def test_each_row_has_a_test() -> None:
    assert sorted(TESTS) == sorted(rows(*SECTIONS))


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("cell", rows(*SECTIONS))
def test_row(cell: str) -> None:
    TESTS[cell]()


def signature(function: Any) -> list[str]:
    return [str(item.replace(annotation=item.empty)) for item in inspect.signature(function).parameters.values()]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def log_softmax(logits: Array, axis: int = -1) -> Array:
    shifted = logits - logits.max(axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))


def picked(logs: Array, classes: Array) -> Array:
    """The negative logarithm of each label, for logarithms [N, C]."""
    return -np.take_along_axis(logs, classes[:, None], 1)[:, 0]


def built(loss_fn: Any, model: ModelProto | None = None, **more: Any) -> TrainNetwork:
    return amp.build_train_network(model or mlp(), SGD(learning_rate=0.1), loss_fn, **more)


def finite_difference(loss: Loss, logits: Array, labels: Array) -> Array:
    """The gradient of a loss, or of its sum, by differences."""
    found = np.zeros_like(logits)
    for place in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-2
        found[place] = (loss(logits + step, labels).sum() - loss(logits - step, labels).sum()) / 2e-2
    return found


def trained(loss: Loss, logits: Array, labels: Array) -> Array:
    """The gradient of a loss in training, for a model that puts out its weights."""
    model = network([make("Add", "x w", "y")], {"w": logits}, list(logits.shape), list(logits.shape))
    return (
        amp.build_train_network(model, SGD(), loss)
        .gradients({"x": np.zeros_like(logits), "label": labels})
        .gradients["w"]
    )


# --- losses -----------------------------------------------------------------------------------------------------


@row("`mindspore.nn`, `paddle.nn`")
def _() -> None:
    """MindSpore's own tutorial of mixed precision, with ``nn`` from here."""
    loss, opt = nn.MSELoss(), nn.Momentum(learning_rate=0.1, momentum=0.9)
    train_network = amp.build_train_network(mlp(), opt, loss, level="O3", loss_scale_manager=None)
    losses = [float(train_network(feeds()["x"], np.ones((4, 3)))) for _ in range(5)]
    assert losses[-1] < losses[0]


@row("`loss(logits, labels)`")
def _() -> None:
    logits = np.array([[3, 5, 6, 9, 12, 33, 42, 12, 32, 72]], np.float32)
    assert nn.SoftmaxCrossEntropyWithLogits(sparse=True)(logits, np.array([1], np.int32)) == [67]
    assert nn.SoftmaxCrossEntropyWithLogits()(logits, np.eye(10, dtype=np.float32)[[6]]) == [30]
    assert nn.MSELoss()([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]) == pytest.approx(5 / 3)
    assert nn.L1Loss()([1.0, 2.0, 3.0], [1.0, 2.0, 2.0]) == pytest.approx(1 / 3)
    with pytest.raises(onnxamp.ArgumentError, match="'label' must have the shape"):
        nn.MSELoss()([1.0, 2.0, 3.0], [1.0, 1.0])
    with pytest.raises(onnxamp.ArgumentError, match="needs the axis 1 of an output that has 1 axes"):
        nn.NLLLoss()([1.0, 2.0, 3.0], 1)


@row("`loss_fn`: the name of a class")
def _() -> None:
    for name in ("MSELoss", "L1Loss", "SoftmaxCrossEntropyWithLogits"):
        found, expected = (
            built(loss).step({"x": feeds()["x"], "label": np.ones((4, 3))}) for loss in (name, getattr(nn, name)())
        )
        assert np.array_equal(found.loss, expected.loss)
    with pytest.raises(onnxamp.ArgumentError, match=r"Unknown loss 'MSEloss'.* Did you mean 'MSELoss'"):
        built("MSEloss")
    with pytest.raises(onnxamp.ArgumentTypeError, match="must return a tensor, not Loss"):
        built(lambda output, label: nn.MSELoss())


@row("a loss of a class of your own")
def _() -> None:
    squared, absolute = nn.MSELoss(), nn.L1Loss()

    def both(output: Any, label: Any) -> Any:
        return squared.write(output, label) * 0.5 + absolute.write(output, label)

    data = {"x": feeds()["x"], "label": np.ones((4, 3))}
    parts = [built(loss).step(data).loss for loss in (squared, absolute)]
    assert built(both).step(data).loss == pytest.approx(0.5 * parts[0] + parts[1])


@row("`nn.SoftmaxCrossEntropyWithLogits(sparse=False, reduction='none')`")
def _() -> None:
    assert signature(nn.SoftmaxCrossEntropyWithLogits) == ["sparse=False", "reduction='none'"]
    expected = picked(log_softmax(LOGITS), CLASSES)
    close(nn.SoftmaxCrossEntropyWithLogits(True)(LOGITS, CLASSES), expected)
    close(nn.SoftmaxCrossEntropyWithLogits(True, "mean")(LOGITS, CLASSES), expected.mean())
    close(nn.SoftmaxCrossEntropyWithLogits(True, "sum")(LOGITS, CLASSES), expected.sum())


@row("`sparse=False`: one-hot labels, `sparse=True`: classes")
def _() -> None:
    classes, one_hot = feeds()["label"], np.eye(3)[feeds()["label"]]
    nets = [built(nn.SoftmaxCrossEntropyWithLogits(sparse, "mean")) for sparse in (True, False)]
    for _ in range(3):
        first, second = (net(feeds()["x"], label).loss for net, label in zip(nets, (classes, one_hot), strict=True))
        assert first == pytest.approx(second, rel=1e-5)
    close(nets[0].state()["w0"], nets[1].state()["w0"])
    with pytest.raises(onnxamp.ArgumentError, match="'label' must have the shape"):
        nets[1](feeds()["x"], classes)


@row(
    "`paddle.nn.CrossEntropyLoss(weight=None, ignore_index=-100, reduction='mean', soft_label=False, axis=-1,"
    " use_softmax=True, label_smoothing=0.0)`"
)
def _() -> None:
    assert signature(nn.CrossEntropyLoss) == [
        "weight=None", "ignore_index=-100", "reduction='mean'", "soft_label=False", "axis=-1", "use_softmax=True",
        "label_smoothing=0.0",
    ]  # fmt: skip
    close(nn.CrossEntropyLoss()(LOGITS, CLASSES), picked(log_softmax(LOGITS), CLASSES).mean())
    words = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    close(nn.CrossEntropyLoss()(words, CLASSES[:3] * np.ones((2, 1), int)), np.mean(
        [picked(log_softmax(sentence), CLASSES[:3]) for sentence in words]))  # fmt: skip


@row("`weight`, `ignore_index` of `CrossEntropyLoss`")
def _() -> None:
    labels = np.array([0, 255, 1, 255, 2])
    counted = labels != 255
    losses = picked(log_softmax(LOGITS), CLASSES * 0 + np.where(counted, labels, 0)) * counted
    factors = WEIGHT[np.where(counted, labels, 0)] * counted
    close(nn.CrossEntropyLoss(ignore_index=255)(LOGITS, labels), losses.sum() / 3)
    close(nn.CrossEntropyLoss(WEIGHT, 255)(LOGITS, labels), (losses * factors).sum() / factors.sum())
    close(nn.CrossEntropyLoss(WEIGHT, 255, "none")(LOGITS, labels), losses * factors)
    assert nn.CrossEntropyLoss()(LOGITS, np.full(5, -100)) == 0
    net = built(nn.CrossEntropyLoss(WEIGHT[:3]))
    some = net(feeds()["x"], [-100, 1, 2, -100]).loss
    assert some == pytest.approx(built(nn.CrossEntropyLoss(WEIGHT[:3]))(feeds()["x"][1:3], [1, 2]).loss, rel=1e-5)
    before = net.state()
    assert net(feeds()["x"], [-100] * 4).loss == 0
    assert all(np.array_equal(net.state()[name], before[name]) for name in net.plan.weights)


@row("`soft_label=True` of `CrossEntropyLoss`")
def _() -> None:
    losses, factors = -(SOFT * log_softmax(LOGITS)).sum(1), SOFT @ WEIGHT
    close(nn.CrossEntropyLoss(soft_label=True)(LOGITS, SOFT), losses.mean())
    close(nn.CrossEntropyLoss(WEIGHT, soft_label=True)(LOGITS, SOFT), (losses * factors).sum() / factors.sum())


@row("`label_smoothing` of `CrossEntropyLoss`")
def _() -> None:
    logs = log_softmax(LOGITS)
    smooth = 0.9 * picked(logs, CLASSES) - 0.1 * logs.mean(1)
    close(nn.CrossEntropyLoss(label_smoothing=0.1)(LOGITS, CLASSES), smooth.mean())
    soft = 0.9 * np.eye(4, dtype=np.float32)[CLASSES] + 0.025
    close(nn.CrossEntropyLoss(soft_label=True)(LOGITS, soft), smooth.mean())
    weighted = 0.9 * WEIGHT[CLASSES] * picked(logs, CLASSES) - 0.1 * (WEIGHT * logs).mean(1)
    found = nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)(LOGITS, CLASSES)
    close(found, weighted.sum() / WEIGHT[CLASSES].sum())
    with pytest.raises(onnxamp.ArgumentError, match="label_smoothing must be a number from 0 to 1, not 2"):
        nn.CrossEntropyLoss(label_smoothing=2)


@row("`use_softmax=False` of `CrossEntropyLoss`")
def _() -> None:
    chances = np.exp(log_softmax(LOGITS))
    close(nn.CrossEntropyLoss(use_softmax=False)(chances, CLASSES), picked(log_softmax(LOGITS), CLASSES).mean())


@row("`mindspore.nn.CrossEntropyLoss(weight=None, ignore_index=-100, reduction='mean', label_smoothing=0.0)`")
def _() -> None:
    images, labels = RNG.standard_normal((2, 4, 3, 5)).astype(np.float32), RNG.integers(0, 4, (2, 3, 5))
    losses = -np.take_along_axis(log_softmax(images, 1), labels[:, None], 1)[:, 0]
    close(nn.CrossEntropyLoss(axis=1)(images, labels), losses.mean())
    factors = WEIGHT[labels]
    close(nn.CrossEntropyLoss(WEIGHT, axis=1)(images, labels), (losses * factors).sum() / factors.sum())
    with pytest.raises(onnxamp.ArgumentError, match="'label' must have the shape"):
        nn.CrossEntropyLoss()(images, labels)
    with pytest.raises(onnxamp.ArgumentTypeError, match="soft_label must be a bool"):
        nn.CrossEntropyLoss(None, -100, "mean", 0.1)


@row("`nn.NLLLoss(weight=None, ignore_index=-100, reduction='mean')`")
def _() -> None:
    assert signature(nn.NLLLoss) == ["weight=None", "ignore_index=-100", "reduction='mean'"]
    close(nn.NLLLoss()(LOGITS, CLASSES), picked(LOGITS, CLASSES).mean())
    images, labels = RNG.standard_normal((2, 4, 3)).astype(np.float32), RNG.integers(0, 4, (2, 3))
    losses = -np.take_along_axis(images, labels[:, None], 1)[:, 0] * WEIGHT[labels]
    close(nn.NLLLoss(WEIGHT)(images, labels), losses.sum() / WEIGHT[labels].sum())


@row("`nn.MSELoss(reduction='mean')`, `nn.L1Loss(reduction='mean')`")
def _() -> None:
    for make_loss, power in ((nn.MSELoss, 2), (nn.L1Loss, 1)):
        expected = np.abs(LOGITS - SOFT) ** power
        close(make_loss()(LOGITS, SOFT), expected.mean())
        close(make_loss("sum")(LOGITS, SOFT), expected.sum())
        close(make_loss(reduction="none")(LOGITS, SOFT), expected)
        close(trained(make_loss(), LOGITS, SOFT), (np.sign(LOGITS - SOFT), 2 * (LOGITS - SOFT))[power - 1] / 20)


def chances_of(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))


@row("`nn.BCELoss(weight=None, reduction='mean')`")
def _() -> None:
    assert signature(nn.BCELoss) == ["weight=None", "reduction='mean'"]
    chances = chances_of(LOGITS)
    losses = -(SOFT * np.log(chances) + (1 - SOFT) * np.log(1 - chances))
    close(nn.BCELoss()(chances, SOFT), losses.mean())
    close(nn.BCELoss(WEIGHT, "sum")(chances, SOFT), (losses * WEIGHT).sum())
    assert np.isfinite(nn.BCELoss()(np.float32([0, 1]), np.float32([1, 0])))
    assert np.isfinite(trained(nn.BCELoss(), np.float32([[0, 1]]), np.float32([[1, 0]]))).all()


@row("`nn.BCEWithLogitsLoss(weight=None, reduction='mean', pos_weight=None)`")
def _() -> None:
    assert signature(nn.BCEWithLogitsLoss) == ["weight=None", "reduction='mean'", "pos_weight=None"]
    chances = chances_of(LOGITS)
    right, wrong = -SOFT * np.log(chances), -(1 - SOFT) * np.log(1 - chances)
    close(nn.BCEWithLogitsLoss()(LOGITS, SOFT), (right + wrong).mean())
    close(nn.BCEWithLogitsLoss(weight=WEIGHT)(LOGITS, SOFT), ((right + wrong) * WEIGHT).mean())
    close(nn.BCEWithLogitsLoss(pos_weight=WEIGHT)(LOGITS, SOFT), (right * WEIGHT + wrong).mean())
    with pytest.raises(TypeError, match="positional"):
        nn.BCEWithLogitsLoss("sum")


@row("labels of shape `[N, 1]` for logits `[N, C]`")
def _() -> None:
    for loss in ("cross-entropy", nn.CrossEntropyLoss(), nn.SoftmaxCrossEntropyWithLogits(True, "mean")):
        nets = [built(loss) for _ in range(2)]
        assert nets[0](feeds()["x"], feeds()["label"][:, None]) == nets[1](feeds()["x"], feeds()["label"])


@row("`reduction='none'`")
def _() -> None:
    for loss, labels in (
        (nn.SoftmaxCrossEntropyWithLogits(True), CLASSES), (nn.CrossEntropyLoss(WEIGHT, 3, "none"), CLASSES),
        (nn.CrossEntropyLoss(WEIGHT, reduction="sum", label_smoothing=0.2), CLASSES), (nn.MSELoss("none"), SOFT),
        (nn.CrossEntropyLoss(WEIGHT, soft_label=True, reduction="none", label_smoothing=0.2), SOFT),
        (nn.BCEWithLogitsLoss(reduction="none", pos_weight=WEIGHT), SOFT),
    ):  # fmt: skip
        expected = finite_difference(loss, LOGITS, labels)
        np.testing.assert_allclose(trained(loss, LOGITS, labels), expected, rtol=1e-2, atol=1e-3)
    net = built(nn.MSELoss("none"))
    assert net(feeds()["x"], np.ones((4, 3))).asnumpy().shape == (4, 3)


@row("`ValueError`: an unknown `reduction`")
def _() -> None:
    for make_loss in (nn.MSELoss, nn.L1Loss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.NLLLoss):
        with pytest.raises(onnxamp.ArgumentError, match="Unknown reduction 'average'"):
            make_loss(reduction="average")


@row("`TypeError`: `sparse` is no bool, `label_smoothing` no number, `ignore_index` not whole")
def _() -> None:
    for name, value in (("label_smoothing", "0.1"), ("ignore_index", 1.5)):
        with pytest.raises(onnxamp.ArgumentTypeError, match=f"{name} must be"):
            nn.CrossEntropyLoss(**{name: value})
    with pytest.raises(onnxamp.ArgumentTypeError, match="sparse must be a bool"):
        nn.SoftmaxCrossEntropyWithLogits(sparse=1)


@row("labels that are no class: undefined, or an error on some devices")
def _() -> None:
    for loss, wrong in ((nn.CrossEntropyLoss(), -1), (nn.SoftmaxCrossEntropyWithLogits(True), -100)):
        with pytest.raises(onnxamp.ArgumentError, match=f"classes from 0 to 2, but 1 of 4 are not, such as {wrong}"):
            built(loss)(feeds()["x"], [0, 1, 2, wrong])


# --- loss scalers -----------------------------------------------------------------------------------------------


class Halving(amp.LossScaler):
    value = 64.0

    def scale(self, inputs: Any) -> Any:
        return inputs * self.value

    def unscale(self, inputs: Any) -> Any:
        return inputs / self.value

    def adjust(self, grads_finite: bool) -> bool:
        self.value = self.value if grads_finite else self.value / 2
        return True


@row("`amp.LossScaler`: the base class")
def _() -> None:
    net = built("cross-entropy", loss_scale_manager=Halving())
    assert [net.step(batch).scale for batch in (LOUD, feeds(), LOUD, feeds())] == [64, 32, 32, 16]
    with pytest.raises(TypeError, match="abstract"):
        amp.LossScaler()


@row("`amp.StaticLossScaler(scale_value)`")
def _() -> None:
    loss_scaler = amp.StaticLossScaler(scale_value=2**10)
    assert loss_scaler.scale(np.array([1.0], np.float32)) == [1024]
    unscaled = loss_scaler.unscale((np.array([1.5, 1.0], np.float16), np.array([1.2], np.float16)))
    np.testing.assert_array_equal(unscaled[0], np.float16([1.4648e-03, 9.7656e-04]))
    np.testing.assert_array_equal(unscaled[1], np.float16([1.1721e-03]))


@row("`amp.DynamicLossScaler(scale_value, scale_factor, scale_window)`")
def _() -> None:
    loss_scaler = amp.DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=1)
    grads = (np.array([np.nan, 1.0], np.float16), np.array([0.2], np.float16))
    unscaled_grads = loss_scaler.unscale(grads)
    grads_finite = amp.all_finite(unscaled_grads)
    assert loss_scaler.adjust(grads_finite) is True
    assert loss_scaler.scale_value == 512
    slow = amp.DynamicLossScaler(4, 4, 3)
    scales = []
    for finite in (True, True, True, True, False, True, True, True, False, False, False):
        slow.adjust(np.bool_(finite))
        scales.append(float(slow.scale_value))
    assert scales == [4, 4, 16, 16, 4, 4, 4, 16, 4, 1, 1]


@row("`loss_scaler.scale(inputs)`, `loss_scaler.unscale(inputs)`")
def _() -> None:
    loss_scaler = amp.StaticLossScaler(4)
    for kind in (np.float16, np.float32, ml_dtypes.bfloat16):
        found = loss_scaler.scale({"a": [np.ones(2, kind)], "b": (np.full((), 2, kind),)})
        assert [found["a"][0].tolist(), found["b"][0].item()] == [[4, 4], 8]
        assert {found["a"][0].dtype, found["b"][0].dtype} == {np.dtype(kind)}
    step = built("cross-entropy", loss_scale_manager=loss_scaler).gradients(feeds())
    exact = built("cross-entropy").gradients(feeds())
    close(loss_scaler.unscale(step.gradients)["w0"], exact.gradients["w0"])


@row("`loss_scaler.adjust(grads_finite)`")
def _() -> None:
    assert amp.StaticLossScaler(8).adjust(False) is False
    assert amp.DynamicLossScaler(8, 2, 1).adjust(True) is True


@row("`loss_scaler.scale_value`")
def _() -> None:
    for loss_scaler in (amp.StaticLossScaler(8), amp.DynamicLossScaler(8, 2, 1)):
        assert (loss_scaler.scale_value, loss_scaler.scale_value.dtype) == (8, np.float32)


@row("`amp.all_finite(inputs, status=None)`")
def _() -> None:
    assert not amp.all_finite((np.array([np.nan, 1, -np.inf]), np.array([1.0])))
    assert amp.all_finite(np.array(1.0))
    assert amp.all_finite([np.array([1.0]), np.ones(2, ml_dtypes.bfloat16)], status=amp.init_status())
    net = built("cross-entropy")
    assert [bool(amp.all_finite(net.gradients(batch).gradients)) for batch in (feeds(), LOUD)] == [True, False]


@row("`amp.init_status()`")
def _() -> None:
    assert amp.init_status().tolist() == [0] * 8


@row("`grads = loss_scaler.unscale(grads)`, `optimizer(grads)`, `loss_scaler.adjust(is_finite)`")
def _() -> None:
    scalers = [amp.DynamicLossScaler(64, 2, 2) for _ in range(2)]
    halves, whole = (built("cross-entropy", loss_scale_manager=scaler) for scaler in scalers)
    for batch in (feeds(), LOUD, feeds(), feeds()):
        step = halves.gradients(batch)
        result = halves.apply(step)
        assert result.overflow == (not amp.all_finite(step.gradients))
        assert whole(batch["x"], batch["label"]) == result or result.overflow
    assert [float(scaler.scale_value) for scaler in scalers] == [64, 64]
    assert np.array_equal(halves.state()["w0"], whole.state()["w0"])


@row("`TypeError`: `scale_value` is no number, or `scale_factor` or `scale_window` not whole")
def _() -> None:
    for arguments, name in (
        (("8", 2, 1), "scale_value"), ((True, 2, 1), "scale_value"), ((8, 1.5, 1), "scale_factor"),
        ((8, 2, 1.5), "scale_window"),
    ):  # fmt: skip
        with pytest.raises(onnxamp.ArgumentTypeError, match=f"{name} must be"):
            amp.DynamicLossScaler(*arguments)


@row("`ValueError`: `scale_value`, `scale_factor` or `scale_window` is below 1")
def _() -> None:
    for arguments, name in (((0.5, 2, 1), "scale_value"), ((8, 0, 1), "scale_factor"), ((8, 2, 0), "scale_window")):
        with pytest.raises(onnxamp.ArgumentError, match=f"{name} must be"):
            amp.DynamicLossScaler(*arguments)
    with pytest.raises(onnxamp.ArgumentError, match="scale_value must be"):
        amp.StaticLossScaler(0)
