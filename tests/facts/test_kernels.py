"""The kernel tables as the cut sees them: pins and pairwise implications must describe exactly what is legal."""

import itertools
from collections.abc import Iterator

import onnx.defs
import pytest
from onnx import helper, parser

from onnxamp._facts.dtypes import BFLOAT16, FLOAT, FLOAT16, FORMATS, Format
from onnxamp._facts.kernels import carries, kernel_table
from onnxamp._facts.ops import op_facts
from onnxamp._facts.signature import Signature, lookup
from onnxamp._graph.targets.freedom import Freedom, Typed, freedom, runs_on

LOWS = pytest.mark.parametrize("low", FORMATS.values(), ids=FORMATS)


def signatures(op: str) -> list[Signature]:
    """All versions of an op."""
    domain, _, name = op.rpartition("::")
    found = {lookup(domain, name, version) for version in range(1, onnx.defs.onnx_opset_version() + 1)}
    return sorted((signature for signature in found if signature is not None), key=lambda row: row.since)


def bindings(provider: str, op: str, signature: Signature) -> Iterator[dict[str, str]]:
    """Type bindings without low types that the tables can tell apart."""
    rows = [row for row in kernel_table(provider).get(op, ()) if row.covers(signature.since)]
    lows = {low.tensor for low in FORMATS.values()}
    choices = []
    for param, allowed in sorted(signature.params.items()):
        named = (set().union(*(row.types.get(param, ()) for row in rows)) & allowed) - lows
        named |= {FLOAT} & allowed
        choices.append(sorted(named) or sorted(allowed - lows)[:1])
    for types in itertools.product(*choices):
        yield dict(zip(sorted(signature.params), types, strict=True))


def nodes(op: str, signature: Signature) -> list[onnx.NodeProto]:
    """The node with all its inputs; where a function body decides, with fewer of them, too."""
    domain, _, name = op.rpartition("::")
    counts = range(1, len(signature.inputs) + 1) if signature.has_function else [len(signature.inputs)]
    outputs = [f"o{index}" for index in range(len(signature.outputs))]
    return [helper.make_node(name, [f"i{i}" for i in range(count)], outputs, domain=domain) for count in counts]


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["cuda", "cpu", "tensorrt"])
@LOWS
def test_pins_and_implications_describe_what_is_legal(low: Format, provider: str) -> None:
    """Legal assignments are closed under minimum and maximum, all-float32 added: only then do arcs suffice."""
    tried = 0
    for op in sorted(kernel_table(provider).keys() - op_facts().control_flow):
        for signature in signatures(op):
            driven = {signature.param(port, position) for position, port in enumerate(signature.inputs)}
            able = sorted(p for p, types in signature.params.items() if {FLOAT, low.tensor} <= types and p in driven)
            if len(able) < 2:
                continue
            for bound, node in itertools.product(bindings(provider, op, signature), nodes(op, signature)):
                params = [param for param in able if bound[param] == FLOAT]
                choices = list(itertools.product((False, True), repeat=len(params)))
                legal = {c for c in choices if runs_on(provider, Typed(signature, mixed(bound, params, c, low), node))}
                if len(params) < 2 or not legal:
                    continue
                tried += 1
                legal.add((False,) * len(params))
                for one, other in itertools.combinations(legal, 2):
                    assert tuple(map(min, one, other)) in legal, (op, signature.since, bound)
                    assert tuple(map(max, one, other)) in legal, (op, signature.since, bound)
                found = freedom(provider, Typed(signature, bound, node), params, low)
                assert {c for c in choices if allows(found, params, c)} == legal, (op, signature.since, bound)
    assert tried > 20


def mixed(bound: dict[str, str], params: list[str], choice: tuple[bool, ...], low: Format) -> dict[str, str]:
    return {**bound, **{param: low.tensor for param, is_low in zip(params, choice, strict=True) if is_low}}


def allows(found: Freedom, params: list[str], choice: tuple[bool, ...]) -> bool:
    is_low = dict(zip(params, choice, strict=True))
    return not any(is_low[param] for param in found.high) and all(is_low[q] or not is_low[p] for p, q in found.implies)


# --- single facts of the design ---------------------------------------------------------------------------------


def found(text: str, opset: int, low: Format, target: str = "cuda", **types: str) -> Freedom:
    """What is free for the node in ``text`` where all its float parameters are float32; others by keyword."""
    node = parser.parse_node(text)
    signature = lookup("", node.op_type, opset)
    assert signature is not None
    used = {signature.param(port, i) for i, port in enumerate(signature.inputs[: len(node.input)])}
    bound = dict.fromkeys(used & signature.params.keys(), FLOAT) | types
    params = [param for param in sorted(bound) if bound[param] == FLOAT and low.tensor in signature.params[param]]
    return freedom(target, Typed(signature, bound, node), params, low)


@pytest.mark.parametrize(
    ("text", "opset", "params"),
    [
        ("Y = Clip (X, l, h)", 17, {"T"}),
        ("Y = MaxPool <kernel_shape = [2, 2]> (X)", 22, {"T"}),
        ("Y = BatchNormalization (X, s, b, m, v)", 17, {"T", "T1", "T2"}),
        ("Y = ConvTranspose (X, w)", 22, {"T"}),
        ("Y = GlobalAveragePool (X)", 22, {"T"}),
    ],
    ids=lambda value: value.split()[2] if isinstance(value, str) else "",
)
def test_no_bfloat16_on_cuda(text: str, opset: int, params: set[str]) -> None:
    assert found(text, opset, BFLOAT16).high == params
    assert found(text, opset, FLOAT16).high == frozenset()
    assert found(text, opset, BFLOAT16, "any") == Freedom()


@pytest.mark.parametrize("opset", [6, 11])
def test_old_clip_has_no_float16(opset: int) -> None:
    text = "Y = Clip (X, l, h)" if opset == 11 else "Y = Clip <min = 0.0> (X)"
    assert found(text, opset, FLOAT16).high == {"T"}


def test_batch_normalization_takes_one_type() -> None:
    implied = set(found("Y = BatchNormalization (X, s, b, m, v)", 17, FLOAT16).implies)
    assert implied == set(itertools.permutations(("T", "T1", "T2"), 2))


def test_pow_may_mix_types() -> None:
    assert found("Y = Pow (X, Z)", 17, FLOAT16) == Freedom()


def test_rms_normalization_in_bfloat16_takes_one_type() -> None:
    text = "Y = RMSNormalization (X, s)"
    assert set(found(text, 23, BFLOAT16).implies) == {("T", "V"), ("V", "T")}
    assert found(text, 23, FLOAT16) == Freedom()


@pytest.mark.parametrize(
    "op", ["Dropout", "Elu", "EyeLike", "InstanceNormalization", "MaxPool", "Selu", "ThresholdedRelu"]
)
def test_an_open_row_matches_its_own_version_alone(op: str) -> None:
    """Opset 22 moved these ops on, and ONNX Runtime's matcher takes an open-ended row for the exact version only."""
    before, newest = lookup("", op, 21), lookup("", op, 22)
    assert before is not None
    assert newest is not None
    assert before.since < newest.since == 22
    rows = kernel_table("cuda")[op]
    assert any(row.covers(before.since) for row in rows)
    assert not any(row.covers(newest.since) for row in rows)


def test_a_node_without_any_kernel_falls_back() -> None:
    text = "Y = InstanceNormalization (X, s, b)"
    assert not found(text, 21, FLOAT16).falls_back
    assert found(text, 22, FLOAT16).falls_back


def test_a_node_without_any_kernel_may_be_low_in_float16_alone() -> None:
    """ONNX Runtime wraps float16 nodes without a CPU kernel in Casts; bfloat16 ones do not load."""
    assert found("Y = Det (X)", 22, FLOAT16).high == frozenset()
    assert found("Y = Det (X)", 22, BFLOAT16).high == {"T"}


def test_loops_carry_what_their_kernel_carries() -> None:
    signature = lookup("", "Loop", 17)
    assert signature is not None
    assert carries("any", "Loop", signature, "tensor(bfloat16)")
    assert carries("cuda", "Loop", signature, "tensor(float16)")
