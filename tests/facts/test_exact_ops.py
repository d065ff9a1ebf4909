"""Every exact op really commutes with rounding: f(round(x)) == round(f(x)), over the whole range of the low type.

The sign of a zero is free: kernels differ in it, and no op of the list looks at it.
"""

from itertools import product

import ml_dtypes
import numpy as np
import onnx.defs
import onnxruntime as ort
import pytest
from graphs.case import parse
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from opening import runtime_version

from onnxamp._facts.dtypes import FORMATS
from onnxamp._facts.ops import is_exact, op_facts

LOWS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROUNDS = 4
INPUTS = {"A": (4, 6), "B": (4, 6), "D": (1, 4, 4, 4), "L": (), "H": ()}
"""Float inputs that the nodes below may read: matrices, an image, and two numbers of which H is the larger."""
TEXT = """(float[4,6] A, float[4,6] B, float[1,4,4,4] D, float L, float H) => (float Y)
<int64 zero = {0}, int64 one = {1}, int64 depth = {5}, int64[1] axis0 = {0}, int64[1] axis = {1}, int64[1] end = {5},
 int64[2] rows = {2, 0}, int64[2] whole = {4, 6}, int64[2] other = {3, 8}, int64[2] times = {2, 3},
 int64[4] pads = {1, 0, 2, 1}, int64[4] lengths = {4, 2, 1, 3}, int64[4] classes = {0, 2, 1, 3},
 int64[1] axis2 = {2}, int64[2,2] points = {0, 1, 3, 5}, int64[2,1] two_rows = {3, 1},
 int64[2,6] picked = {0, 1, 2, 3, 0, 1, 1, 2, 3, 0, 1, 2}, int64[1,4,2,2] places = {0, 3, 9, 15, 17, 18, 25, 31,
 32, 39, 40, 47, 63, 50, 51, 60}, bool[4,1] keep = {1, 0, 1, 0}, bool[6] some = {1, 1, 0, 0, 1, 0},
 float[4] scales = {1, 1, 2, 3}>
{ NODES }"""

WINDOW = "<kernel_shape = [2, 2], strides = [2, 2]>"
NODES = {
    "Abs": ["Y = Abs (A)"],
    "CenterCropPad": ["Y = CenterCropPad (A, other)"],
    "Clip": ["Y = Clip (A, L, H)", "Y = Clip (A)", "Y = Clip (A, , H)"],
    "Compress": ["Y = Compress <axis = 1> (A, some)"],
    "Concat": ["Y = Concat <axis = 0> (A, B)"],
    "ConcatFromSequence": ["S = SequenceConstruct (A, B) Y = ConcatFromSequence <axis = 1> (S)"],
    "DepthToSpace": ["Y = DepthToSpace <blocksize = 2> (D)"],
    "Dropout": ["Y = Dropout (A)"],
    "Expand": ["Y = Expand (L, whole)"],
    "Flatten": ["Y = Flatten <axis = 2> (D)"],
    "Gather": ["Y = Gather (A, rows)"],
    "GatherElements": ["Y = GatherElements (A, picked)"],
    "GatherND": ["Y = GatherND (A, points)"],
    "GlobalMaxPool": ["Y = GlobalMaxPool (D)"],
    "Identity": ["Y = Identity (A)"],
    "Max": ["Y = Max (A, B)", "Y = Max (A, B, L)"],
    "MaxPool": ["Y = MaxPool <kernel_shape = [2, 2], strides = [2, 1]> (D)"],
    "MaxUnpool": [f"P = MaxPool {WINDOW} (D) Y = MaxUnpool {WINDOW} (P, places)"],
    "Min": ["Y = Min (A, B)", "Y = Min (A, L)"],
    "Neg": ["Y = Neg (A)"],
    "OneHot": [
        "P = Reshape (L, axis) Q = Reshape (H, axis) V = Concat <axis = 0> (P, Q) Y = OneHot (classes, depth, V)"
    ],
    "OptionalGetElement": ["O = Optional (A) Y = OptionalGetElement (O)"],
    "Optional": ["O = Optional (A) Y = OptionalGetElement (O)"],
    "Pad": ["Y = Pad (A, pads, L)", 'Y = Pad <mode = "reflect"> (A, pads)', "Y = Pad (A, pads)"],
    "ReduceMax": ["Y = ReduceMax (A, axis)"],
    "ReduceMin": ["Y = ReduceMin <keepdims = 0> (A)"],
    "Relu": ["Y = Relu (A)"],
    "Reshape": ["Y = Reshape (A, other)"],
    "Resize": ['Y = Resize <mode = "nearest"> (D, , scales)'],
    "ReverseSequence": ["Y = ReverseSequence <batch_axis = 0, time_axis = 1> (A, lengths)"],
    "Scatter": ["P = Gather (B, rows) Y = Scatter (A, picked, P)"],
    "ScatterElements": ["P = Gather (B, rows) Y = ScatterElements (A, picked, P)"],
    "ScatterND": ["P = Gather (B, rows) Y = ScatterND (A, two_rows, P)"],
    "SequenceAt": ["S = SequenceConstruct (A, B) Y = SequenceAt (S, one)"],
    "SequenceConstruct": ["S = SequenceConstruct (A, B) Y = SequenceAt (S, one)"],
    "SequenceEmpty": ["E = SequenceEmpty () S = SequenceInsert (E, A) Y = SequenceAt (S, zero)"],
    "SequenceErase": ["S = SequenceConstruct (A, B) T = SequenceErase (S, zero) Y = SequenceAt (T, zero)"],
    "SequenceInsert": ["S = SequenceConstruct (A) T = SequenceInsert (S, B, zero) Y = SequenceAt (T, zero)"],
    "Slice": ["Y = Slice (A, axis, end, axis)"],
    "SpaceToDepth": ["Y = SpaceToDepth <blocksize = 2> (D)"],
    "Split": ["Y, Z = Split <axis = 1, num_outputs = 2> (A)"],
    "SplitToSequence": ["S = SplitToSequence <axis = 1> (A) Y = SequenceAt (S, one)"],
    "Squeeze": ["Y = Squeeze (D)"],
    "TensorScatter": ["P = Slice (D, axis0, axis, axis2) Y = TensorScatter (D, P, axis)"],
    "Tile": ["Y = Tile (A, times)"],
    "Transpose": ["Y = Transpose (A)"],
    "Trilu": ["Y = Trilu <upper = 0> (A, one)"],
    "Unsqueeze": ["Y = Unsqueeze (A, axis)"],
    "Upsample": ['Y = Upsample <mode = "nearest"> (D, scales)'],
    "Where": ["Y = Where (keep, A, B)"],
}
"""Op type -> nodes that exercise it; what else stands there is exact, too."""
OPSETS = {"Scatter": 10, "Upsample": 9, "TensorScatter": 24}
"""Where an op is not of opset 21."""
NOT_BY_REFERENCE = frozenset({"OneHot", "Optional", "OptionalGetElement", "Resize", "Scatter"})
NO_FLOATS_OUT = frozenset({"OptionalHasElement", "SequenceLength", "Shape", "Size"})
"""What these answer does not depend on the numbers."""
EXAMPLES = [(op, nodes) for op, examples in NODES.items() for nodes in examples]


def model(op: str, nodes: str) -> ModelProto:
    result = parse(TEXT.replace("NODES", nodes), OPSETS.get(op, 21), ir=10)
    result.graph.output[0].type.tensor_type.ClearField("shape")  # it differs from example to example
    return result


def session(op: str, nodes: str) -> ort.InferenceSession:
    """The nodes in float32 on ONNX Runtime's CPU provider; skips what the installed versions do not know yet."""
    if OPSETS.get(op, 21) > onnx.defs.onnx_opset_version() or (op == "TensorScatter" and runtime_version() < (1, 24)):
        pytest.skip(f"the installed onnx or onnxruntime has no {op}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # it warns of initializers that this example does not use
    return ort.InferenceSession(model(op, nodes).SerializeToString(), options, providers=["CPUExecutionProvider"])


def draws(seed: int) -> dict[str, np.ndarray]:
    """Numbers of all magnitudes and both signs: too small for the low types, subnormal, on ties, too large, zeros."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in INPUTS.items():
        spread = rng.choice([2.0, 12.0, 40.0])
        numbers = rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-spread, min(spread, 18), shape)
        ties = np.round(numbers * 2**12) / 2**12 + 2.0**-12
        numbers = np.where(rng.uniform(size=shape) < 0.2, ties, numbers)
        found[name] = np.where(rng.uniform(size=shape) < 0.1, 0, numbers).astype(np.float32)
    found["L"], found["H"] = min(found["L"], found["H"]), max(found["L"], found["H"])
    return found


def rounded(array: np.ndarray, low: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(LOWS[low])


@pytest.mark.parametrize(("op", "nodes"), EXAMPLES, ids=[f"{op}-{i}" for i, (op, _) in enumerate(EXAMPLES)])
def test_commutes_with_rounding(op: str, nodes: str) -> None:
    run = session(op, nodes)
    used = {entry.name for entry in run.get_inputs()}
    for seed, low in product(range(ROUNDS), FORMATS):
        feeds = {name: array for name, array in draws(seed).items() if name in used}
        low_feeds = {name: rounded(array, low).astype(np.float32) for name, array in feeds.items()}
        after = rounded(run.run(["Y"], feeds)[0], low)
        before = rounded(run.run(["Y"], low_feeds)[0], low)
        np.testing.assert_array_equal(before.astype(np.float32), after.astype(np.float32))


@pytest.mark.parametrize(("op", "nodes"), EXAMPLES, ids=[f"{op}-{i}" for i, (op, _) in enumerate(EXAMPLES)])
def test_computes_the_same_in_float16(op: str, nodes: str) -> None:
    """The op itself in low precision; the reference evaluator computes in the type of what it is fed."""
    if op in NOT_BY_REFERENCE or OPSETS.get(op, 21) > onnx.defs.onnx_opset_version():
        pytest.skip("the reference evaluator calculates where kernels copy, or lacks the op")
    evaluator = ReferenceEvaluator(model(op, nodes))
    for seed in range(ROUNDS):
        feeds = draws(seed)
        found = evaluator.run(["Y"], {name: rounded(array, "float16") for name, array in feeds.items()})[0]
        assert found.dtype == np.float16
        np.testing.assert_array_equal(found, rounded(evaluator.run(["Y"], feeds)[0], "float16"))


def test_every_exact_op_has_an_example() -> None:
    assert {op.rpartition("::")[2] for op in op_facts().exact} == NODES.keys() | NO_FLOATS_OUT


@pytest.mark.parametrize("op", sorted(op_facts().exact & NODES.keys()))
def test_examples_are_exact(op: str) -> None:
    """The condition on attributes and outputs, where there is one, holds for the example."""
    for nodes in NODES[op]:
        parsed = model(op, nodes).graph.node
        assert op in {node.op_type for node in parsed}
        assert all(map(is_exact, parsed))


INEXACT = {
    "MaxPool": "Y, I = MaxPool <kernel_shape = [2, 2]> (D)",
    "Resize": 'Y = Resize <mode = "linear"> (D, , scales)',
    "Upsample": 'Y = Upsample <mode = "linear"> (D, scales)',
    "ScatterElements": 'P = Gather (B, rows) Y = ScatterElements <reduction = "add"> (A, picked, P)',
    "ScatterND": 'P = Gather (B, rows) Y = ScatterND <reduction = "mul"> (A, two_rows, P)',
}


@pytest.mark.parametrize(("op", "nodes"), INEXACT.items(), ids=INEXACT)
def test_conditions_tell_exact_from_inexact(op: str, nodes: str) -> None:
    assert not is_exact(model(op, nodes).graph.node[-1])


@pytest.mark.parametrize("op", ["Sign", "ArgMax", "TopK", "NonZero", "Floor", "Ceil", "Round", "AveragePool", "Add"])
def test_what_only_looks_exact(op: str) -> None:
    assert op not in op_facts().exact
