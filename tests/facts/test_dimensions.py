"""The table of dimensions holds what schemas hold."""

import onnx.defs
import pytest
from onnx import helper

from onnxamp._facts.dimensions import ALIGNED, FREE, DimensionRule, Multiple, dimension_rules, names_of
from onnxamp._facts.signature import lookup

RULES = [(op, rule) for op, rules in dimension_rules().items() for rule in rules]
VERSION = onnx.defs.onnx_opset_version()


def attributes_of(rule: DimensionRule) -> set[str]:
    terms = {term for shape in (*rule.inputs, rule.every) for term in shape or () if term not in (ALIGNED, FREE)}
    named = {name for term in terms for name in names_of(term) if len(name) > 1}
    return named | {*rule.absent, *rule.when, *rule.unless, *filter(None, (rule.equation, rule.joined))}


@pytest.mark.parametrize(("op", "rule"), RULES, ids=[op for op, _ in RULES])
def test_rows_name_inputs_and_attributes_of_their_ops(op: str, rule: DimensionRule) -> None:
    domain, _, name = op.rpartition("::")
    signature = lookup(domain, name, 1 if domain else VERSION)
    assert signature is not None
    assert len(rule.inputs) <= signature.max_inputs
    if signature.attributes is None:  # ONNX Runtime does not tell
        return
    assert attributes_of(rule) <= signature.attributes.keys()
    schema = onnx.defs.get_schema(name, VERSION, domain)
    for key, value in rule.absent.items():
        assert helper.get_attribute_value(schema.attributes[key].default_value) == value
    for key in rule.when:
        assert helper.get_attribute_value(schema.attributes[key].default_value) == 0


@pytest.mark.parametrize(("op", "rule"), RULES, ids=[op for op, _ in RULES])
def test_terms_are_products_of_a_size(op: str, rule: DimensionRule) -> None:
    for shape in (*rule.inputs, rule.every):
        terms = [term for term in shape or () if term not in (ALIGNED, FREE)]
        assert len(shape or ()) - len(terms) <= 1
        for term in terms:
            letters = {name for name in names_of(term) if len(name) == 1}
            assert len(letters) <= 1


def test_what_a_row_says_of_a_node() -> None:
    (rule,) = dimension_rules()["Conv"]
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=2)
    related = rule.related(node, [("N", "C", "H", "W"), (8, 3, 5, 5)])
    assert related is not None
    assert related.multiples == [
        (Multiple("n", 1), "N"),
        (Multiple("c", 2), "C"),
        (Multiple("o", 1), 8),
        (Multiple("c", 1), 3),
    ]
    assert [*map(tuple, related.aligned)] == [(), ()]
    assert rule.related(node, [("N",), (8, 3)]) is None


def test_a_packed_product_of_attributes() -> None:
    sliding, *_ = rules = dimension_rules()["com.microsoft::GroupQueryAttention"]
    packed = next(rule for rule in rules if not rule.when)
    node = helper.make_node("GroupQueryAttention", ["q", "", "", "pk", "pv"], ["y"], num_heads=8, kv_num_heads=2)
    related = packed.related(node, [("B", "S", "H"), None, None, ("B", "K", "P", "D"), None])
    assert related is not None
    assert (Multiple("h", 12), "H") in related.multiples
    assert (Multiple("", 2), "K") in related.multiples
    assert sliding.related(node, [("B", "S", "H"), None, None, ("B", "K", "P", "D"), None]) is None
    node.attribute.extend(
        helper.make_attribute(*pair) for pair in (("sliding_window_cache", 1), ("local_window_size", 5))
    )
    ring = sliding.related(node, [("B", "S", "H"), None, None, ("B", "K", "P", "D"), None])
    assert ring is not None
    assert (Multiple("", 5), "P") in ring.multiples
    node.input[1] = "k"
    assert packed.related(node, [("B", "S", "H"), None, None, None, None]) is None
