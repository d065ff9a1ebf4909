"""The doors of the package: arguments by the names of MindSpore, Paddle and PyTorch, and errors that are its own."""

import contextlib
import copy
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_door import foreign
from train_nets import feeds, mlp

import onnxamp
from onnxamp import OnnxAmpError, amp, debugging, train
from onnxamp._facts.tables import read_table
from onnxamp.train import SGD, Adam, AdamW, FixedLossScaleManager, Momentum, build_train_network

MODEL = mlp()
ROWS = read_table("other_arguments")["arguments"]
RESULTS = {
    "AccuracyRow", "Decorated", "FlushedGradient", "Gradients", "LayerCheck", "OperatorStats", "ScaleUpdate",
    "StepArrays", "StepCheck", "StepGradients", "StepResult", "TensorChecker", "TensorStats", "TrainNetwork",
    "ValueRecord",
}  # fmt: skip
"""Classes whose objects functions return, and nobody else makes."""
BASES = {"LossScaleManager", "LossScaler", "Optimizer"}
"""Classes for users to extend."""


def public() -> dict[str, Callable[..., Any]]:
    """The functions and classes that users call, by name."""
    found = {name: getattr(module, name) for module in (amp, train, debugging) for name in module.__all__}
    kinds = (Warning, debugging.DebugMode)
    return {
        name: item
        for name, item in sorted(found.items())
        if callable(item) and name not in RESULTS | BASES and not (isinstance(item, type) and issubclass(item, kinds))
    }


PUBLIC = public()


def given(folder: Path) -> dict[str, Any]:
    """A value for each argument that some function needs."""
    return {
        "network": MODEL, "model": MODEL, "models": MODEL, "path_or_bytes": MODEL, "reference": MODEL, "result": MODEL,
        "optimizer": SGD(), "tensor": np.ones(2), "op_type": "Add", "var_name": "sum", "inputs": [np.ones(2)],
        "scale_value": 8.0, "scale_factor": 2, "scale_window": 3, "arrays": {"x": np.ones((2, 2))}, "size": 1,
        "function": lambda output, labels: (output - labels).op("ReduceSum", keepdims=0), "enable": True,
        "checker_config": debugging.TensorCheckerConfig(enable=False), "dump_path": folder / "none",
        "another_dump_path": folder / "none", "path": folder / "none", "output_filename": folder / "table.csv",
        "loss": "loss", "wanted": ["w"],
    }  # fmt: skip


USUAL = {
    "custom_mixed_precision": {"white_list": ["MatMul"]},
    "build_train_network": {"loss_fn": "cross-entropy"},
    "check_layer_numerics": {"layer": "no node"},
}
"""Arguments without which a function does nothing."""


def usual(name: str, folder: Path) -> dict[str, Any]:
    """The arguments of a call that are needed."""
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    needed = {item.name for item in parameters if item.default is item.empty and item.kind is not item.VAR_KEYWORD}
    return {key: value for key, value in given(folder).items() if key in needed} | USUAL.get(name, {})


def call(name: str, arguments: dict[str, Any]) -> None:
    """Call a function; errors of the package are as they should be."""
    try:
        found = PUBLIC[name](**arguments)
        if hasattr(found, "__enter__"):
            with found:
                pass
    except OnnxAmpError as error:
        text = str(error)
        assert text.endswith((".", "?")), text
    finally:
        debugging.disable_tensor_checker()
        debugging.disable_operator_stats_collection()


def others() -> Iterator[str]:
    """All names of arguments of frameworks, and those of all public functions."""
    for row in ROWS:
        for field in ("same", "parts", "neutral", "instead"):
            yield from row.get(field, {})
        yield from row.get("needless", [])
    for function in PUBLIC.values():
        yield from inspect.signature(function).parameters


@pytest.mark.filterwarnings("ignore::onnxamp.OnnxAmpWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_by_any_name_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    needed = usual(name, tmp_path)
    own = inspect.signature(PUBLIC[name]).parameters.keys()
    for other in sorted({*others(), "no_such_argument"} - own):
        call(name, {**needed, other: 3})


@pytest.mark.filterwarnings("ignore::onnxamp.OnnxAmpWarning")
@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - {"InferenceSession"}))
def test_values_of_any_type_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    """A session passes options of users to ONNX Runtime, and its exceptions on."""
    needed = usual(name, tmp_path)
    names = [
        item.name
        for item in inspect.signature(PUBLIC[name]).parameters.values()
        if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
    ]
    odd = (None, -1, 1.5, "x", b"x", object(), [1], {"a": 1}, np.ones(2))
    for argument, value in itertools.product(names, odd):
        call(name, {**needed, argument: value})


@pytest.mark.parametrize("name", PUBLIC)
def test_missing_and_further_arguments(name: str) -> None:
    with pytest.raises(onnxamp.ArgumentTypeError, match="positional argument"):
        PUBLIC[name](*[[]] * 20)
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    if any(item.default is item.empty and item.kind is not item.VAR_KEYWORD for item in parameters):
        with pytest.raises(onnxamp.ArgumentTypeError, match=f"{name.replace('amp_decorate', 'decorate')} needs "):
            PUBLIC[name]()


def test_the_table_names_what_there_is() -> None:
    for row in ROWS:
        for name in row["of"]:
            owner, _, method = name.rpartition(".")
            function = getattr(PUBLIC.get(owner) or getattr(train, owner), method) if owner else PUBLIC[name]
            own = inspect.signature(function).parameters
            names = row.get("same", {})
            assert set(names.values()) <= own.keys(), name
            assert not names.keys() & own.keys() or len(row["of"]) > 1, name
            assert all(set(parts) <= own.keys() for parts in row.get("parts", {}).values()), name
            taken = {*own, *names, *row.get("needless", []), *row.get("neutral", {})}
            assert all(set(order) <= taken for order in row.get("first", {}).values()), name
            assert all(text[-1] not in ".!?" for text in row.get("instead", {}).values()), name


TAKEN = {
    "Adam(lr)": (lambda: Adam(lr=0.1), Adam(learning_rate=0.1)),
    "Adam(betas)": (lambda: Adam(betas=(0.8, 0.9), eps=1e-6), Adam(beta1=0.8, beta2=0.9, epsilon=1e-6)),
    "Adam(amsgrad=False)": (lambda: Adam(amsgrad=False, foreach=True, weight_decay=0.1), Adam(weight_decay=0.1)),
    "Adam by position": (lambda: Adam(0.1, 0.8), Adam(learning_rate=0.1, beta1=0.8)),
    "AdamW": (lambda: AdamW(lr=1, multi_precision=True, grad_clip=None), AdamW(learning_rate=1)),
    "SGD(0.1)": (lambda: SGD(0.1), SGD(learning_rate=0.1)),
    "SGD without momentum": (lambda: SGD(lr=0.1, momentum=0, dampening=0.0, nesterov=False), SGD(learning_rate=0.1)),
    "Momentum(0.1, 0.8)": (lambda: Momentum(0.1, 0.8), Momentum(learning_rate=0.1, momentum=0.8)),
    "use_nesterov": (lambda: Momentum(use_nesterov=True), Momentum(nesterov=True)),
    "accumulation": (lambda: SGD(gradient_accumulation_steps=4), SGD(accumulate=4)),
}  # fmt: skip


@pytest.mark.parametrize(("made", "wanted"), TAKEN.values(), ids=TAKEN)
def test_optimizers_take_the_names_of_frameworks(made: Callable[[], Any], wanted: Any) -> None:
    assert made() == wanted


def test_functions_take_the_names_of_frameworks() -> None:
    wanted = amp.auto_mixed_precision(MODEL, "O2", "bfloat16")
    assert amp.auto_mixed_precision(MODEL, level="O2", amp_dtype="bfloat16") == wanted
    assert amp.auto_mixed_precision(model=MODEL, amp_level="O2", dtype="BFLOAT16") == wanted
    white = amp.custom_mixed_precision(MODEL, white_list=["MatMul"])
    assert amp.custom_mixed_precision(net=MODEL, custom_white_list=["MatMul"]) == white
    net = build_train_network(MODEL, SGD(), loss="cross-entropy", amp_level="O2", scaler=None)
    assert net.loss_scale_manager is None
    assert net.has_low
    scalers = [amp.GradScaler("cuda"), amp.GradScaler("cuda:1"), amp.GradScaler(device=foreign("torch", "cuda"))]
    assert all(scaler.state_dict() == amp.GradScaler().state_dict() for scaler in scalers)
    assert amp.DynamicLossScaleManager(init_scale=8.0, growth_interval=3).get_update_cell().grow_every == 3
    assert [batch["x"].shape for batch in train.Batches({"x": np.ones((3, 2))}, batch_size=2)] == [(2, 2), (1, 2)]


REFUSED = {
    "SGD(momentum)": (lambda: SGD(momentum=0.9), r"SGD takes no momentum=0.9: use Momentum\(momentum="),
    "amsgrad": (lambda: Adam(amsgrad=True), "Adam takes no amsgrad=True"),
    "betas": (lambda: Adam(betas=0.9), "betas must hold beta1 and beta2, not 0.9"),
    "grad_clip": (lambda: SGD(grad_clip=object()), "pass clip_norm=N"),
    "parameters": (lambda: SGD([MODEL], lr=0.1), "SGD takes no positional arguments: it needs no parameters"),
    "parameters by name": (lambda: Adam(0.1, parameters=[]), "it needs no parameters"),
    "twice": (lambda: SGD(0.1, learning_rate=1), "SGD got the argument 'learning_rate' twice"),
    "twice by two names": (lambda: SGD(lr=0.1, learning_rate=1), "got the argument 'lr' twice as 'learning_rate'"),
    "by position and name": (lambda: amp.auto_mixed_precision(MODEL, "O1", level="O2"), "'level' twice as 'amp_level'"),
    "misspelled": (lambda: SGD(learnin_rate=0.1), "Did you mean 'learning_rate'?"),
    "a level for a list": (lambda: amp.custom_mixed_precision(MODEL, level="O1"), "auto_mixed_precision takes a level"),
    "lists of a level": (lambda: amp.auto_mixed_precision(MODEL, white_list=[]), "pass it to custom_mixed_precision"),
    "a level for a device": (lambda: amp.auto_cast("O2"), "pass settings by name, such as level='O2'"),
    "no device": (lambda: amp.GradScaler("O2"), "it would be 'cuda' or 'cpu'"),
    "scale_factor": (lambda: amp.GradScaler(scale_factor=2), "pass incr_ratio and decr_ratio"),
    "no optimizer": (lambda: amp.GradScaler().step(), "step needs optimizer"),
    "autocast(level)": (lambda: amp.autocast("cuda", level="O1"), "auto_cast takes one"),
    "pipeline": (lambda: build_train_network(MODEL, SGD(), pipeline_stages=2), "there are no pipeline stages"),
}


@pytest.mark.parametrize(("made", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_names_what_to_write(made: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        made()
    assert isinstance(caught.value, OnnxAmpError)


def test_an_optimizer_takes_the_loss_scale_that_mindspore_requires() -> None:
    fixed = FixedLossScaleManager(1024.0, drop_overflow_update=False)
    net = build_train_network(MODEL, Momentum(loss_scale=1024.0), "cross-entropy", loss_scale_manager=fixed)
    other = build_train_network(MODEL, Momentum(), "cross-entropy", loss_scale_manager=fixed)
    for one in (net, other):
        assert one.step(feeds()).scale == 1024
    assert all((array == other.state()[name]).all() for name, array in net.state().items())
    for manager in (None, FixedLossScaleManager(1024.0), FixedLossScaleManager(8, drop_overflow_update=False)):
        with pytest.raises(ValueError, match=r"FixedLossScaleManager\(1024, drop_overflow_update=False\)"):
            build_train_network(MODEL, SGD(loss_scale=1024.0), "cross-entropy", loss_scale_manager=manager)
    with pytest.raises(ValueError, match="loss_scale must be a positive number"):
        SGD(loss_scale=0)


def test_a_network_is_always_in_training() -> None:
    net = build_train_network(MODEL, SGD(), "cross-entropy")
    assert net.set_train() is net.train() is net.train(mode=True) is net
    for method in (net.train, net.set_train):
        with pytest.raises(ValueError, match=r"InferenceSession\(net.export\(\)\)"):
            method(False)
    net.optimizer.zero_grad()


FORMS = {
    "float16": [
        "FLOAT16", "Float16", "fp16", "half", "torch.float16", "mstype.float16", foreign("torch", "torch.float16"),
        foreign("mindspore._c_expression.typing", "Float16"), foreign("paddle.base.libpaddle", "VarType.FP16"),
        foreign("paddle", "paddle.float16"),
    ],
    "bfloat16": ["BFLOAT16", "bf16", "torch.bfloat16", foreign("torch", "torch.bfloat16")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_types_of_frameworks(name: str, form: Any) -> None:
    assert onnxamp.Options("O2", dtype=form).dtype == name
    assert amp.auto_mixed_precision(MODEL, "O2", form) == amp.auto_mixed_precision(MODEL, "O2", name)
    (decorated,) = amp.decorate([MODEL], level="O2", dtype=form, save_dtype=form)
    assert (decorated.dtype, decorated.save_dtype) == (name, name)


@pytest.mark.parametrize("form", [foreign("torch", "torch.float32"), "FLOAT32", foreign("torch", "torch.int8")])
def test_other_types_of_frameworks_are_refused(form: Any) -> None:
    with pytest.raises(onnxamp.ArgumentError, match="choose one of float16, bfloat16"):
        amp.auto_mixed_precision(MODEL, "O2", form)


@pytest.mark.parametrize("form", [foreign("torch", "tensor([1.])"), foreign("elsewhere", "torch.float16")])
def test_what_is_no_type(form: Any) -> None:
    with pytest.raises(onnxamp.ArgumentTypeError, match="dtype must be a name"):
        amp.auto_mixed_precision(MODEL, "O2", form)


def objects() -> list[Any]:
    net = build_train_network(MODEL, Momentum(), "cross-entropy")
    return [net, net.optimizer, amp.GradScaler(), onnxamp.InferenceSession(MODEL)]


def test_names_of_other_frameworks_say_what_to_write() -> None:
    made = objects()
    for row in read_table("other_arguments")["attributes"]:
        (found,) = (item for item in made if {base.__name__ for base in type(item).__mro__} & {*row["of"]})
        for name, text in row["instead"].items():
            with pytest.raises(AttributeError) as caught:
                getattr(found, name)
            assert str(caught.value) == f"{type(found).__name__} has no attribute {name!r}: {text}."
            assert isinstance(caught.value, onnxamp.MissingNameError)
            assert caught.value.name == name
            assert not hasattr(found, name)


def test_misspelled_names_suggest_the_nearest_one() -> None:
    net, optimizer, scaler, session = objects()
    spelled = ((net, "gradient", "gradients"), (scaler, "get_scales", "get_scale"), (session, "runn", "run"))
    for found, name, near in spelled:
        with pytest.raises(onnxamp.MissingNameError, match=f"Did you mean '{near}'?"):
            getattr(found, name)
    assert copy.deepcopy(optimizer) == pickle.loads(pickle.dumps(optimizer)) == optimizer
    assert copy.copy(scaler).state_dict() == scaler.state_dict()


METHODS = {
    "TrainNetwork": ("step", "gradients", "apply", "load_state", "flushed", "train", "set_train"),
    "GradScaler": (
        "scale", "unscale_", "step", "update", "minimize", "load_state_dict", "set_growth_factor", "set_decr_ratio",
        "set_growth_interval", "set_init_loss_scaling",
    ),
    "InferenceSession": ("run",),
    "DynamicLossScaler": ("scale", "unscale"),
}  # fmt: skip
"""Methods that users call with arguments, by class."""


@pytest.mark.parametrize("kind", METHODS)
def test_methods_take_values_of_any_type_or_refuse_them(kind: str) -> None:
    made = {type(item).__name__: item for item in [*objects(), amp.DynamicLossScaler(8.0, 2, 3)]}
    needed = {"feeds": feeds(), "optimizer": made["TrainNetwork"], "input_feed": {"x": feeds()["x"]}, "var": 1.0}
    odd = (None, -1, "x", object(), [1], {"a": 1}, {1: 2}, np.ones(2), np.float32)
    for name in METHODS[kind]:
        method = getattr(made[kind], name)
        parameters = inspect.signature(method).parameters
        usual = {key: needed.get(key) for key, item in parameters.items() if item.default is item.empty}
        for argument, value in itertools.product(parameters.keys() - {"run_options"}, odd):
            with contextlib.suppress(OnnxAmpError):
                method(**{**usual, argument: value})
        with pytest.raises(onnxamp.ArgumentTypeError, match="takes no argument 'no_such_argument'"):
            method(**usual, no_such_argument=1)


def test_arrays_in_order_name_what_takes_them() -> None:
    net, batch = build_train_network(MODEL, SGD(), "cross-entropy"), feeds()
    with pytest.raises(onnxamp.ArgumentTypeError, match=r"net\(\*arrays\) makes a step with arrays"):
        net.step(batch["x"], batch["label"])
    assert net(batch["x"], batch["label"]).loss == pytest.approx(build_train_network(
        MODEL, SGD(), "cross-entropy").step(data=batch).loss)  # fmt: skip
