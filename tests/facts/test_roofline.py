"""Time by the roofline: known work of known ops, and devices from data."""

import pytest
from graphs.case import parse

from onnxamp import ArgumentError
from onnxamp._facts.devices import DEFAULT_DEVICE, Device, device_called, device_titled, devices
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import read_shapes, with_shapes
from onnxamp._graph.types import infer_types
from onnxamp._graph.work import Work, work_of

WORK = {
    "MatMul": ("(float[2,3,4] a, float[4,5] b) => (float[2,3,5] y) { y = MatMul (a, b) }", 24 + 20 + 30, 2 * 4 * 30),
    "Gemm": ("(float[3,4] a, float[4,5] b) => (float[3,5] y) { y = Gemm (a, b) }", 12 + 20 + 15, 2 * 4 * 15),
    "Gemm transposed": (
        "(float[4,3] a, float[4,5] b) => (float[3,5] y) { y = Gemm <transA = 1> (a, b) }", 12 + 20 + 15, 2 * 4 * 15,
    ),
    "Conv": (
        "(float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y) { y = Conv (x, w) }",
        192 + 108 + 144, 2 * 27 * 144,
    ),
    "Conv of groups": (
        "(float[1,4,8,8] x, float[4,1,3,3] w) => (float[1,4,6,6] y) { y = Conv <group = 4> (x, w) }",
        256 + 36 + 144, 2 * 9 * 144,
    ),
    "Add": ("(float[5,6] a, float[6] b) => (float[5,6] y) { y = Add (a, b) }", 30 + 6 + 30, 30),
}  # fmt: skip


@pytest.mark.parametrize(("text", "touched", "flops"), WORK.values(), ids=WORK)
def test_work(text: str, touched: int, flops: int) -> None:
    view = Graph.of(parse(text))
    shapes = read_shapes(view, with_shapes(view, infer_types(view)))
    is_product = view.nodes[0].key != "Add"
    assert work_of(view.nodes[0], shapes) == Work(touched, flops, is_product)
    assert work_of(view.nodes[0], shapes, trips=7) == Work(7 * touched, 7 * flops, is_product)


def test_unknown_shapes_are_guessed() -> None:
    view = Graph.of(parse("(float[N,K] a, float[K,M] b) => (float[N,M] y) { y = MatMul (a, b) }"))
    work = work_of(view.nodes[0], read_shapes(view, with_shapes(view, infer_types(view))))
    assert work.elements > 0
    assert work.flops > work.elements


def test_time_is_the_longer_of_traffic_and_arithmetic() -> None:
    device = Device("toy", bandwidth=100, float32=10, products=50, low=1000)
    memory_bound, compute_bound = Work(1000, 0), Work(0, 1000)
    assert (memory_bound.time(device, low=None), memory_bound.time(device, low=FLOAT16)) == (40, 20)
    assert (compute_bound.time(device, low=None), compute_bound.time(device, low=FLOAT16)) == (100, 1)
    assert Work(1000, 1000).time(device, low=None) == 100
    assert Work(0, 1000, products=True).time(device, low=None) == 20, "TF32"


def test_what_drivers_call_devices() -> None:
    titles = {
        "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H100 80GB HBM3": "H100", "Tesla T4": "T4", "NVIDIA A10": "A10",
        "NVIDIA A10G": DEFAULT_DEVICE, "CUDA device": DEFAULT_DEVICE,
    }  # fmt: skip
    assert {title: device_titled(title) for title in titles} == titles


def test_devices() -> None:
    a100 = device_called(DEFAULT_DEVICE)
    assert a100.bandwidth == pytest.approx(2.039e6), "bytes per microsecond: 2039 GB/s"
    assert a100.low == pytest.approx(312e6), "operations per microsecond: 312 TFLOP/s"
    for name, device in devices().items():
        assert device.name == name
        assert 0 < device.float32 <= device.products <= device.low, name
        assert device.bandwidth < device.float32, name
    with pytest.raises(ArgumentError, match=r"Unknown device 'TPU': choose one of .*A100"):
        device_called("TPU")
