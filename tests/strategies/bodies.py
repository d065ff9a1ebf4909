"""If, Loop, Scan and SequenceMap with random bodies, which capture what is around them and nest twice."""

from collections.abc import Sequence

from onnx import GraphProto, TypeProto, helper

from .builder import FLOAT, Builder, Scope
from .values import Value, tensor_type

KINDS = (FLOAT, FLOAT, FLOAT, "tensor(float16)", "tensor(int64)", "tensor(double)")


def control_flow(builder: Builder, scope: Scope, op: str) -> None:
    """Append a node of the op, with its bodies."""
    {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}[op](builder, scope)


def _wants(builder: Builder, count: int) -> list[TypeProto]:
    return [tensor_type(builder.rng.choice(KINDS), builder.rng.choice(((2, 3), (3,), (1, 3)))) for _ in range(count)]


def _body(builder: Builder, scope: Scope, inputs: Sequence[Value], wants: Sequence[TypeProto | Value]) -> GraphProto:
    """A body that reads inputs and captures, and returns one value of each wanted type, or a given one."""
    inner = Scope(scope, inputs=[helper.make_value_info(v.name, v.type) for v in inputs], values=list(inputs))
    builder.grow(inner, builder.rng.randint(0, 3))
    results: list[Value] = []
    for want in wants:
        value = want if isinstance(want, Value) else _result(builder, inner, want)
        own = any(value.name in node.output for node in inner.nodes)
        if not own or value in results:
            value = Value(builder.apply(inner, "Identity", [value])[0].name, value.type)
        results.append(value)
    outputs = [helper.make_value_info(value.name, value.type) for value in results]
    return helper.make_graph(inner.nodes, "body", inner.inputs, outputs, inner.initializers)


def _result(builder: Builder, inner: Scope, want: TypeProto) -> Value:
    wanted = Value("", want)
    if not want.HasField("sequence_type"):
        value = builder.shaped(inner, wanted.kind, [dim or 0 for dim in wanted.shape or ()])
        return Value(value.name, want)
    held = next(value for value in reversed(inner.values) if value.kind == wanted.kind)
    element = builder.shaped(inner, wanted.kind[4:-1], (2, 3))
    return Value(builder.apply(inner, "SequenceInsert", [held, element])[0].name, want)


def _if(builder: Builder, scope: Scope) -> None:
    condition = builder.shaped(scope, "tensor(bool)", ())
    wants = _wants(builder, builder.rng.randint(1, 2))
    branches = {name: _body(builder, scope, [], wants) for name in ("then_branch", "else_branch")}
    proto = helper.make_node("If", [condition.name], [builder.name() for _ in wants], **branches)
    builder.add(scope, proto, wants)


def _states(builder: Builder, scope: Scope, *, sequences: bool) -> list[Value]:
    """Values from outside that a loop shall carry."""
    found = []
    for want in _wants(builder, builder.rng.randint(1, 2)):
        value = Value("", want)
        found.append(builder.shaped(scope, value.kind, [dim or 0 for dim in value.shape or ()]))
    if sequences and builder.chance(0.25):
        found.append(builder.sequence(scope, ["seq(tensor(float))"]))
    return found


def _inside(builder: Builder, values: Sequence[Value]) -> list[Value]:
    return [Value(builder.name(), value.type) for value in values]


def _loop(builder: Builder, scope: Scope) -> None:
    trips = builder.store(scope, "tensor(int64)", builder.rng.choice((2, [2])))
    condition = builder.store(scope, "tensor(bool)", True) if builder.chance(0.5) else None
    states = _states(builder, scope, sequences=builder.opset >= 13)
    turn = Value(builder.name(), tensor_type("tensor(int64)", ()))
    go_on = Value(builder.name(), tensor_type("tensor(bool)", ()))
    inner = _inside(builder, states)
    scanned = _wants(builder, builder.rng.randint(0, 1))
    body = _body(builder, scope, [turn, go_on, *inner], [go_on, *(value.type for value in states), *scanned])
    inputs = [trips.name, condition.name if condition else "", *(value.name for value in states)]
    types = [value.type for value in states] + [_stacked(want, None) for want in scanned]
    builder.add(scope, helper.make_node("Loop", inputs, [builder.name() for _ in types], body=body), types)


def _stacked(want: TypeProto, count: int | None) -> TypeProto:
    value = Value("", want)
    return tensor_type(value.kind, (count, *(value.shape or ())))


def _scan(builder: Builder, scope: Scope) -> None:
    states = _states(builder, scope, sequences=False)
    scanned = [builder.shaped(scope, FLOAT, (2, 3)) for _ in range(builder.rng.randint(1, 2))]
    rows = [Value(builder.name(), tensor_type(FLOAT, (3,))) for _ in scanned]
    wants = _wants(builder, 1)
    body = _body(builder, scope, [*_inside(builder, states), *rows], [*(value.type for value in states), *wants])
    types = [value.type for value in states] + [_stacked(want, 2) for want in wants]
    inputs = [value.name for value in (*states, *scanned)]
    outputs = [builder.name() for _ in types]
    builder.add(scope, helper.make_node("Scan", inputs, outputs, body=body, num_scan_inputs=len(scanned)), types)


def _sequence_map(builder: Builder, scope: Scope) -> None:
    sequence = builder.sequence(scope, ["seq(tensor(float))"])
    extra = [builder.shaped(scope, FLOAT, (3,))] if builder.chance(0.5) else []
    inner = [Value(builder.name(), tensor_type(FLOAT, (2, 3))), *_inside(builder, extra)]
    (want,) = _wants(builder, 1)
    body = _body(builder, scope, inner, [want])
    inputs = [sequence.name, *(value.name for value in extra)]
    proto = helper.make_node("SequenceMap", inputs, [builder.name()], body=body)
    builder.add(scope, proto, [helper.make_sequence_type_proto(want)])
