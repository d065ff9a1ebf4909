"""Facts held against their sources: op names and ports against schemas, float formats against NumPy and ml_dtypes."""

import itertools
import re
import tomllib
from dataclasses import fields
from importlib import resources

import ml_dtypes
import numpy as np
import onnx.defs
import onnx.reference
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from opening import runtime_version

from onnxamp._facts.dtypes import (
    BFLOAT16,
    ELEM_NUMBERS,
    FLOAT16,
    FORMATS,
    Format,
    element_name,
    holds_float,
    is_lossless,
    readable_types,
    retyped,
)
from onnxamp._facts.ops import OpFacts, OutputParameter, op_facts
from onnxamp._facts.signature import Signature, lookup
from onnxamp._options.lists import PRESETS, preset

LOWS = pytest.mark.parametrize("low", FORMATS.values(), ids=FORMATS)
NUMPY = {
    "bool": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float": np.float32,
    "double": np.float64,
}
FLOATS = ("float16", "bfloat16", "float", "double")
INTEGERS = [name for name in NUMPY if name not in FLOATS]
WITHOUT_SCHEMA = {"com.microsoft::Rsqrt"}
"""Ops of models for runtimes with kernels of their own: known as parts of a normalization alone."""
KNOWN_RUNTIME = (1, 31)
"""The ONNX Runtime whose ops the tables know; with an older one some have no schema."""

needs_known_runtime = pytest.mark.skipif(
    runtime_version() < KNOWN_RUNTIME, reason="the tables know a newer onnxruntime"
)


# --- op names and ports ---------------------------------------------------------------------------------------


def facts() -> dict:
    return tomllib.loads(resources.files("onnxamp").joinpath("_data/ops.toml").read_text(encoding="utf-8"))


def newest(op: str) -> Signature | None:
    """The op's last version that was not deprecated."""
    domain, _, name = op.rpartition("::")
    found = (lookup(domain, name, version) for version in range(onnx.defs.onnx_opset_version(), 0, -1))
    return next((signature for signature in found if signature is not None and signature.outputs), None)


@needs_known_runtime
def test_every_op_exists() -> None:
    schemas = itertools.chain(onnx.defs.get_all_schemas(), get_all_operator_schema())
    known = {f"{schema.domain}::{schema.name}" if schema.domain else schema.name for schema in schemas}
    assert facts().keys() - known == WITHOUT_SCHEMA


def test_rows_are_sorted() -> None:
    assert list(facts()) == sorted(facts(), key=lambda op: ("::" in op, op))


def test_every_flag_and_column_is_explained_and_known() -> None:
    """A slip in a name would be a fact that nobody reads."""
    text = resources.files("onnxamp").joinpath("_data/ops.toml").read_text(encoding="utf-8")
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    columns = {name for row in facts().values() for name in row} - {"moves", "is", "arithmetic"}
    flags = {flag for row in facts().values() for flag in row.get("is", ())}
    kinds = {kind for row in facts().values() for kind in row.get("arithmetic", ())}
    read = {field.name for field in fields(OpFacts)}
    assert (columns | flags | {f"{kind}_arithmetic" for kind in kinds}) - read == set(), "add fields to OpFacts"
    unexplained = [name for name in (*columns, *flags, *kinds) if not re.search(rf"\b{name}(:|, )", comments)]
    assert unexplained == [], "explain them in the comments at the head of onnxamp/_data/ops.toml"


def test_no_flag_is_given_twice() -> None:
    lists = [row[name] for row in facts().values() for name in ("is", "arithmetic") if name in row]
    assert all(sorted(set(names)) == names for names in lists)


def test_conditions_are_of_exact_ops() -> None:
    assert op_facts().exact_when.keys() <= op_facts().exact


@pytest.mark.parametrize("op", op_facts().moved_inputs)
def test_data_movement_keeps_types(op: str) -> None:
    """What is moved has the type of what it is moved from: a container's, its element's, or that of a tensor."""
    signature = newest(op)
    assert signature is not None
    inputs = [signature.input(port) for port in op_facts().moved_inputs[op][:3]]
    assert inputs
    assert None not in inputs or facts()[op]["moves"] == "all"
    if op in op_facts().moves_data:
        assert {signature.output(0).type} == {port.type for port in inputs if port is not None}


def test_data_movement_is_exact() -> None:
    assert op_facts().moves_data <= op_facts().exact & op_facts().unrounded & op_facts().mask_arithmetic
    assert op_facts().moves_data.isdisjoint(op_facts().containers | op_facts().control_flow)
    assert not any({"exact"} & set(facts()[op].get("is", ())) for op in op_facts().moved_inputs)


def test_exact_ops_are_no_control_flow() -> None:
    assert not op_facts().exact & op_facts().control_flow


@pytest.mark.parametrize("name", PRESETS)
def test_black_ops_are_not_exact(name: str) -> None:
    """An exact op in float32 saves no accuracy: on a black list it could only cost Casts."""
    assert not set(preset(name).black) & op_facts().exact


@needs_known_runtime
@pytest.mark.parametrize(("op", "rule"), op_facts().output_parameter.items())
def test_output_parameters_exist(op: str, rule: OutputParameter) -> None:
    schema = onnx.defs.get_schema(op)
    assert rule.attribute in schema.attributes
    assert rule.parameter in {port.type_str for port in schema.outputs} - {port.type_str for port in schema.inputs}


@pytest.mark.parametrize("op", op_facts().dtype_attribute)
def test_dtype_attributes_exist(op: str) -> None:
    domain, _, name = op.rpartition("::")
    if not onnx.defs.has(name, domain):
        pytest.skip("the installed onnx does not know the op yet")
    assert op_facts().dtype_attribute[op].attribute in onnx.defs.get_schema(name, domain).attributes


@needs_known_runtime
@pytest.mark.parametrize("op", op_facts().pinned_parameters)
def test_pinned_parameters_exist(op: str) -> None:
    signature = newest(op)
    if signature is None:  # test_every_op_exists looks for slips
        pytest.skip("the installed onnx does not know the op yet")
    assert op_facts().pinned_parameters[op] <= set(signature.params)


@pytest.mark.parametrize(
    "table",
    [
        "index_inputs",
        "guarded",
        "added_epsilons",
        "bounding_epsilons",
        "choices",
        "divisors",
        "size_inputs",
        "mask_inputs",
        "score_masks",
        "types_only",
        "boxes",
    ],
)
def test_ports_exist(table: str) -> None:
    for op, ports in getattr(op_facts(), table).items():
        signature = newest(op)
        assert signature is not None
        assert all(signature.input(port) is not None for port in ports[:64]), op  # a range may have no end


def test_what_passes_on_says_when_and_can() -> None:
    for op, how in op_facts().passes_on.items():
        signature = newest(op)
        assert signature is not None
        assert how in ("always", "same type", "alone")
        assert (signature.inputs[0].type == signature.outputs[0].type) == (how != "same type"), op
        assert (signature.max_inputs > 1) == (how == "alone"), op
    assert op_facts().relabels == {"Cast", "Identity"}


def test_biases_are_optional_third_inputs() -> None:
    for op in op_facts().biased:
        signature = newest(op)
        assert signature is not None
        assert signature.min_inputs == 2 < len(signature.inputs), op
        assert signature.inputs[2].type == signature.inputs[0].type, op


def test_reductions_along_axes_can_keep_their_dimensions() -> None:
    reducing = {op for op in facts() if op.startswith("Reduce")}
    assert op_facts().reduces_axes == reducing
    assert op_facts().reductions <= reducing | {"GlobalAveragePool"}
    for op in reducing:
        signature = newest(op)
        assert signature is not None
        assert "keepdims" in (signature.attributes or {}), op


@pytest.mark.parametrize("op", sorted(op_facts().commutative))
def test_ops_that_commute_do(op: str) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(op, ["a", "b"], ["y"])],
            op,
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "ab"],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        )
    )
    a, b = np.float32([1, -2, 0.5, 3e30]), np.float32([3, 7, -0.0, 2])
    run = onnx.reference.ReferenceEvaluator(model).run
    np.testing.assert_array_equal(run(None, {"a": a, "b": b})[0], run(None, {"a": b, "b": a})[0])


def test_regions_are_inputs() -> None:
    for op, region in op_facts().region.items():
        domain, _, name = op.rpartition("::")
        signature = lookup(domain, name, region["since"])
        assert signature is not None
        assert signature.since == region["since"]
        assert signature.inputs[region["input"]].name == "roi"


@needs_known_runtime
@pytest.mark.parametrize("op", sorted(op_facts().lookups.keys() | op_facts().placements.keys()))
def test_lookups_exist(op: str) -> None:
    signature = newest(op)
    assert signature is not None
    for row in op_facts().lookups.get(op) or op_facts().placements[op]:
        assert signature.input(row.indices) is not None
        assert signature.input(row.table) is not None


@needs_known_runtime
@pytest.mark.parametrize("op", op_facts().products)
def test_weights_of_products_are_where_the_table_says(op: str) -> None:
    domain, _, name = op.rpartition("::")
    schemas = [onnx.defs.get_schema(name)] if not domain else []
    schemas += [schema for schema in get_all_operator_schema() if (schema.domain, schema.name) == (domain, name)]
    schema = schemas[0]
    for row in op_facts().products[op]:
        assert row.weight < len(schema.inputs)
        assert (row.rows is None) != (row.steps is None)
        assert row.rows is None or row.rows < len(schema.inputs)
        assert row.steps is None or row.steps < len(schema.outputs)
        flags = {row.turned, row.rows_turned, *(condition["attribute"] for condition in row.when)} - {None}
        assert flags <= set(schema.attributes)


@needs_known_runtime
@pytest.mark.parametrize("op", op_facts().computes_in)
def test_attributes_that_name_a_precision_exist(op: str) -> None:
    schemas = [schema for schema in get_all_operator_schema() if schema.name == op and not schema.domain]
    if onnx.defs.has(op):
        schemas.append(onnx.defs.get_schema(op))
    assert any(op_facts().computes_in[op] in schema.attributes for schema in schemas)


@pytest.mark.parametrize("op", op_facts().misread_defaults)
def test_misread_defaults_are_those_of_the_schema(op: str) -> None:
    attributes = onnx.defs.get_schema(op).attributes
    for name, default in op_facts().misread_defaults[op].items():
        assert helper.get_attribute_value(attributes[name].default_value) == default


def test_divisors_are_guarded() -> None:
    guarded = op_facts().guarded
    assert all(set(ports) <= set(guarded[op]) for op, ports in op_facts().divisors.items())


def test_random_ops_are_those_with_a_seed() -> None:
    seeded = {s.name for s in onnx.defs.get_all_schemas() if not s.domain and "seed" in s.attributes}
    assert op_facts().random == seeded - {"Dropout"}


def test_what_does_not_count() -> None:
    assert op_facts().uncounted == op_facts().idle | op_facts().control_flow


# --- float formats --------------------------------------------------------------------------------------------


@LOWS
def test_limits(low: Format) -> None:
    info = ml_dtypes.finfo(NUMPY[low.name])
    assert low.max_finite == float(info.max)
    assert low.smallest_normal == float(info.smallest_normal)
    assert low.smallest_subnormal == float(info.smallest_subnormal)
    assert low.epsilon == float(info.eps)
    assert low.elem == TensorProto.DataType.Value(low.name.upper())
    assert low.tensor == f"tensor({low.name})"


@LOWS
def test_overflow_is_where_rounding_ends(low: Format) -> None:
    below = np.nextafter(np.float32(low.overflow), np.float32(0))
    with np.errstate(over="ignore"):
        rounded = np.asarray([below, low.overflow], np.float32).astype(NUMPY[low.name]).astype(np.float32)
    assert list(rounded) == [low.max_finite, np.inf]


@LOWS
def test_exact_integers(low: Format) -> None:
    numbers = np.arange(low.exact_integers + 2)
    kept = numbers.astype(np.float32).astype(NUMPY[low.name]).astype(np.int64) == numbers
    assert kept[:-1].all()
    assert not kept[-1]


@LOWS
def test_first_opset_of_the_cast(low: Format) -> None:
    targets = [
        "T2" in (signature := lookup("", "Cast", version)).params and low.tensor in signature.params["T2"]
        for version in range(6, 14)
    ]
    assert targets.index(True) + 6 == low.min_opset


def test_element_names_are_those_of_onnx() -> None:
    known = set(TensorProto.DataType.values())  # an older onnx knows fewer
    for name, number in ((name, number) for name, number in ELEM_NUMBERS.items() if number in known):
        assert helper.tensor_dtype_to_string(number).split(".")[1].lower() == name


def test_retyped() -> None:
    assert retyped("seq(tensor(float))", FLOAT16) == "seq(tensor(float16))"
    assert retyped("optional(seq(tensor(float)))", BFLOAT16) == "optional(seq(tensor(bfloat16)))"
    assert retyped("tensor(float16)", BFLOAT16) == "tensor(float16)"
    assert retyped("tensor(float8e4m3fn)", FLOAT16) == "tensor(float8e4m3fn)"
    assert [name for name in ("map(int64,tensor(float))", "tensor(double)", None) if holds_float(name)] == []


def test_types_for_people() -> None:
    assert readable_types("tensor(float)") == "float32"
    assert readable_types("optional(seq(tensor(double)))") == "optional(seq(float64))"
    assert readable_types("map(int64,tensor(float16)) instead of tensor(float8e4m3fn)") == (
        "map(int64,float16) instead of float8e4m3fn"
    )
    assert readable_types("sparse_tensor(float)") == "sparse_tensor(float)"
    assert readable_types(None) == "unknown"


def test_element_names() -> None:
    assert [element_name(name) for name in ("tensor(float)", "tensor(bfloat16)")] == ["float", "bfloat16"]
    assert [element_name(name) for name in (None, "", "seq(tensor(float))", "map(int64,tensor(float))")] == [""] * 4


# --- is_lossless ----------------------------------------------------------------------------------------------


def survives(values: np.ndarray, target: str) -> bool:
    """Whether all values are the same after a cast to ``target``; NaN counts as kept where it stays NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        there = values.astype(NUMPY[target])
        return bool(np.array_equal(there.astype(np.float64), values.astype(np.float64), equal_nan=True))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_lossless_over_all_patterns(source: str, target: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[source])
    assert is_lossless(source, target) == survives(patterns, target)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["float", "double"])
def test_lossless_of_wide_floats(source: str, target: str) -> None:
    info = np.finfo(NUMPY[source])
    ends = np.asarray([info.max, info.smallest_subnormal, 1 + info.eps, -info.smallest_normal], NUMPY[source])
    assert is_lossless(source, target) == survives(ends, target)


def boundaries(name: str) -> list[int]:
    """Integers of the type around powers of two, where formats end."""
    if name == "bool":
        return [0, 1]
    info = np.iinfo(NUMPY[name])
    powers = (sign * (1 << bits) + step for bits in range(65) for sign in (1, -1) for step in (-1, 0, 1))
    return sorted({number for number in powers if info.min <= number <= info.max})


def keeps(number: int, source: str, target: str) -> bool:
    """Whether one integer survives, in Python's exact arithmetic."""
    if target in INTEGERS:
        return boundaries(target)[0] <= number <= boundaries(target)[-1]
    with np.errstate(over="ignore"):
        found = float(np.asarray([number], NUMPY[source]).astype(NUMPY[target])[0])
    return np.isfinite(found) and int(found) == number


@pytest.mark.mostly_slow(fast=39)
@pytest.mark.parametrize("target", NUMPY)
@pytest.mark.parametrize("source", INTEGERS)
def test_lossless_of_integers(source: str, target: str) -> None:
    assert is_lossless(source, target) == all(keeps(number, source, target) for number in boundaries(source))


@pytest.mark.parametrize("source", FLOATS)
def test_no_integer_holds_floats(source: str) -> None:
    assert not any(is_lossless(source, target) for target in INTEGERS)


def test_unknown_types_are_lossless_to_themselves() -> None:
    assert is_lossless("string", "string")
    assert is_lossless("float8e5m2", "float8e5m2")
    assert not is_lossless("float8e5m2", "float16")
    assert not is_lossless("float", "string")


# --- what onnx infers -----------------------------------------------------------------------------------------

LOWERABLE = {"tensor(float)", "tensor(float16)"}
FILLED: dict[str, dict] = {
    "AffineGrid": {}, "Attention": {}, "LinearAttention": {"q_num_heads": 1, "kv_num_heads": 1},
}  # fmt: skip
"""Required attributes of ops below."""


def mixed_signatures() -> list[Signature]:
    """Every version of an op whose inputs may have two float types at once."""
    found = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        signature = lookup(schema.domain, schema.name, schema.since_version)
        if signature is None or schema.deprecated or "preview" in schema.domain:
            continue
        params = {port.type for port in signature.inputs if signature.params.get(port.type, set()) >= LOWERABLE}
        if len(params) > 1:
            found[schema.domain, schema.name, schema.since_version] = signature
    return list(found.values())


@pytest.mark.parametrize("signature", mixed_signatures(), ids=lambda s: f"{s.op_type}-{s.since}")
def test_tied_parameters_are_those_that_onnx_ties(signature: Signature) -> None:
    """onnx infers the type that the schema says, whatever the other parameters are, and its function takes them."""
    params = sorted({port.type for port in signature.inputs if signature.params.get(port.type, set()) >= LOWERABLE})
    wanted = [not port.optional or port.type in params for port in signature.inputs]
    names = [f"in{port}" if is_wanted else "" for port, is_wanted in enumerate(wanted)]
    outputs = [f"out{port}" for port in range(signature.min_outputs)]
    node = helper.make_node(signature.op_type, names, outputs, **FILLED.get(signature.op_type, {}))
    schema = onnx.defs.get_schema(signature.op_type, signature.since, signature.domain)
    tied = set()
    for low in params:
        bound = {param: TensorProto.FLOAT16 if param == low else TensorProto.FLOAT for param in params}
        types = {}
        for name, port in zip(names, signature.inputs, strict=True):
            kind = next(iter(sorted(signature.params.get(port.type, {port.type}))))
            elem = bound.get(port.type) or ELEM_NUMBERS.get(element_name(kind), TensorProto.INT64)
            types[name] = helper.make_tensor_type_proto(elem, None)
        imports = [helper.make_opsetid(signature.domain, signature.since)]
        types.pop("", None)
        try:
            inferred = onnx.shape_inference.infer_node_outputs(schema, node, types, opset_imports=imports)
        except onnx.checker.ValidationError:  # of the body of its function
            tied |= set(params)
            continue
        for name, port in zip(outputs, signature.outputs, strict=False):
            found = inferred[name].tensor_type.elem_type if name in inferred else 0
            if port.type in bound and found not in (0, bound[port.type]):
                tied |= {low, port.type}

    assert tied == op_facts().tied_parameters.get(signature.op_type, set()), "one column of ops.toml is not true"
