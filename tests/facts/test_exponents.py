"""The rules of exponents held against the schemas: ops, positions, attributes and their defaults."""

import itertools
import tomllib
from importlib import resources

import onnx.defs
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from onnxamp._facts.exponents import ALL, exponent_rules, parse_sum
from onnxamp._facts.ops import op_facts

from .test_facts import WITHOUT_SCHEMA, needs_known_runtime, newest


def all_attributes(op: str) -> dict[str, float | None]:
    """Attribute -> its default, of all versions of an op."""
    found: dict[str, float | None] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.name == op:
            for name, item in schema.attributes.items():
                has_default = item.default_value.name != ""
                found[name] = onnx.helper.get_attribute_value(item.default_value) if has_default else None
    return found


@needs_known_runtime
def test_ops_and_positions_exist() -> None:
    schemas = itertools.chain(onnx.defs.get_all_schemas(), get_all_operator_schema())
    known = {f"{schema.domain}::{schema.name}" if schema.domain else schema.name for schema in schemas}
    assert exponent_rules().keys() - known <= WITHOUT_SCHEMA
    for op, rule in exponent_rules().items():
        signature = newest(op)
        if signature is None:
            continue
        sums = [side for equation in rule.equations for side in equation]
        sums += [item.by for item in (rule.attributes or {}).values()]
        for term in (term for side in sums for term in side if term.position != ALL):
            port = signature.output(term.position) if term.is_output else signature.input(term.position)
            assert port is not None, (op, term)


def test_no_rule_for_what_moves_data() -> None:
    """Both tables would say the same: Concat alone is in both, because its inputs are many."""
    assert exponent_rules().keys() & op_facts().moved_inputs.keys() == {"Concat"}


def test_each_op_has_one_rule() -> None:
    data = tomllib.loads(resources.files("onnxamp").joinpath("_data/exponents.toml").read_text(encoding="utf-8"))
    listed = [op for row in data["rules"] for op in row["ops"]]
    assert sorted(set(listed)) == sorted(listed)


@pytest.mark.slow
def test_attributes_and_defaults_are_those_of_the_schemas() -> None:
    for op, rule in exponent_rules().items():
        known = all_attributes(op)
        for name, item in (rule.attributes or {}).items():
            if "::" in op or op == "SimplifiedLayerNormalization":
                continue
            assert name in known, (op, name)
            if item.default is not None:
                assert known[name] == pytest.approx(item.default), (op, name)


def test_sums_are_read() -> None:
    assert [tuple(term) for term in parse_sum("2 x0 - x1 + y0")] == [(2, False, 0), (-1, False, 1), (1, True, 0)]
    assert parse_sum("0") == ()
    with pytest.raises(ValueError, match="not a sum"):
        parse_sum("x0 + banana")
