"""Growing a random graph node by node; every node is valid by its schema, its recipe and onnx's own inference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, TypeProto, ValueInfoProto, helper
from onnx.defs import OpSchema
from onnx.shape_inference import infer_node_outputs

from .computed import Computed
from .table import CONTROL_FLOW, Recipe, plain_ops, recipe, schema_at
from .values import ELEMS, FLOATS, USUAL, Value, numbers, tensor, tensor_type

FLOAT = "tensor(float)"
OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
VARIADIC = onnx.defs.OpSchema.FormalParameterOption.Variadic
KINDS = {elem: kind for kind, elem in ELEMS.items()}
SHAPES = ((2, 3), (2, 3), (2, 3, 4), (3,), (1, 3), (2, 1, 4), (4, 2), ())


@dataclass
class Scope:
    """A graph under construction: the main one, or a body."""

    parent: "Scope | None" = None
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    inputs: list[ValueInfoProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def chain(self) -> Iterator["Scope"]:
        """This scope, and those around it."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    @property
    def depth(self) -> int:
        return sum(1 for _ in self.chain()) - 1

    def visible(self) -> list[Value]:
        """Values that a node here may read; inner ones hide outer ones of the same name."""
        found: dict[str, Value] = {}
        for scope in self.chain():
            for value in scope.values:
                found.setdefault(value.name, value)
        return list(found.values())


class Builder:
    """Draws nodes and what they read. ``feeds`` are the numbers of the model's inputs."""

    def __init__(self, rng: Random, opset: int) -> None:
        self.rng = rng
        self.opset = opset
        self.main = Scope()
        self.feeds: dict[str, Any] = {}
        self.jumps = False
        self.hostile = rng.random() < 0.15
        self.exotic = rng.choice((0.02, 0.02, 0.2))
        self.count = 0

    def name(self) -> str:
        """A new name, now and then one that the conversion would like to give."""
        self.count += 1
        ending = (
            self.rng.choice(("_fp16", "_bf16", "_fp32", "/Cast", "_cast")) if self.hostile and self.count > 1 else ""
        )
        return f"v{self.count - 1}{ending}" if ending else f"v{self.count}_"

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -- values ------------------------------------------------------------------------------------------------

    def add(self, scope: Scope, proto: NodeProto, types: Sequence[TypeProto | None]) -> list[Value]:
        """Append a node; its outputs whose types are known become values."""
        scope.nodes.append(proto)
        made = [
            Value(name, type_) for name, type_ in zip(proto.output, types, strict=True) if name and type_ is not None
        ]
        scope.values += made
        return made

    def apply(
        self, scope: Scope, op: str, inputs: Sequence[Value | None], outputs: int = 1, **attributes: Any
    ) -> list[Value]:
        """Append a node that reads these values, with the types of its outputs as onnx infers them."""
        names = [value.name if value else "" for value in inputs]
        while names and not names[-1] and self.chance(0.7):
            names.pop()
        proto = helper.make_node(op, names, [self.name() for _ in range(outputs)], **attributes)
        given = [value for value in inputs if value is not None]
        schema = schema_at(op, self.opset)
        assert schema is not None
        inferred = infer_node_outputs(
            schema, proto, {value.name: value.type for value in given},
            {value.name: value.data for value in given if value.data is not None},
            opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10,
        )  # fmt: skip
        types = [inferred.get(name) for name in proto.output]
        return self.add(
            scope, proto, [type_ if type_ is None or type_.WhichOneof("value") else None for type_ in types]
        )

    def fresh(self, scope: Scope, kind: str, shape: Sequence[int], low: float = -2, high: float = 2) -> Value:
        """A new value: an initializer, a Constant, a model input, or a Cast of another type."""
        if kind == FLOAT and self.chance(0.08):
            schema = schema_at("Cast", self.opset)
            assert schema is not None
            sources = schema.type_constraints[0].allowed_type_strs
            return self.cast(scope, self.fresh(scope, self.rng.choice([k for k in USUAL if k in sources]), shape), kind)
        return self.store(scope, kind, numbers(self.rng, kind, shape, low, high))

    def store(self, scope: Scope, kind: str, data: Any) -> Value:
        """Given numbers as an initializer, a Constant, or a model input that is fed with them."""
        way = self.rng.choice(("initializer", "initializer", "Constant", "input", "input"))
        array = np.asarray(data)
        home = scope if way == "Constant" or self.chance(0.5) else self.main
        if way == "Constant" and kind == FLOAT and self.opset >= 9 and self.chance(0.3):
            return self.computed(home, array)
        if way == "Constant":
            return self.constant(home, kind, array)
        name = self.name()
        stored = tensor(name, kind, array, self.rng)
        if way == "initializer" or kind == "tensor(string)":
            value = Value(name, tensor_type(kind, array.shape), stored)
            home.initializers.append(stored)
            home.values.append(value)
            return value
        value = Value(name, tensor_type(kind, array.shape))
        self.main.inputs.append(helper.make_value_info(name, value.type))
        self.main.values.append(value)
        self.feeds[name] = array.astype(helper.tensor_dtype_to_np_dtype(ELEMS[kind]))
        return value

    def constant(self, scope: Scope, kind: str, array: np.ndarray) -> Value:
        """A Constant node, in one of the forms that its schema has for such numbers."""
        forms: dict[str, Any] = {"value": tensor("", kind, array, self.rng)}
        short = {FLOAT: ("value_float", "value_floats"), "tensor(int64)": ("value_int", "value_ints")}.get(kind)
        if short and self.opset >= 12 and array.ndim < 2 and array.size:
            plain = array.astype(float if kind == FLOAT else int).tolist()
            forms = {short[array.ndim]: plain} if self.chance(0.5) else forms
        name = self.name()
        proto = helper.make_node("Constant", [], [name], **forms)
        scope.nodes.append(proto)
        value = Value(name, tensor_type(kind, array.shape), tensor(name, kind, array))
        scope.values.append(value)
        return value

    def computed(self, scope: Scope, array: np.ndarray) -> Value:
        """Numbers that nodes compute from other Constants."""
        made = Computed(self.rng, array, self.opset, self.name, self.rng.randint(1, 4))
        scope.nodes += made.nodes
        value = Value(made.result, tensor_type(FLOAT, array.shape))
        scope.values.append(value)
        return value

    def cast(self, scope: Scope, value: Value, kind: str) -> Value:
        self.jumps |= value.kind in FLOATS and kind not in FLOATS
        return self.apply(scope, "Cast", [value], to=ELEMS[kind])[0]

    def shaped(self, scope: Scope, kind: str, shape: Sequence[int], low: float = -2, high: float = 2) -> Value:
        """A value of this type and shape: one that is there, one made fit, or a new one."""
        there = [value for value in scope.visible() if value.kind == kind]
        fit = [value for value in there if value.shape == tuple(shape)]
        if low < -1 and fit and self.chance(0.7):
            return self.rng.choice(fit)
        source = self.rng.choice(there) if low < -1 and kind in FLOATS - {"tensor(bfloat16)"} and there else None
        if source is None or source.shape is None or self.chance(0.4):
            return self.fresh(scope, kind, shape, low, high)
        if source.static and source.size == int(np.prod(shape)):
            turned = self.apply(scope, "Reshape", [source, self.store(scope, "tensor(int64)", list(shape))])[0]
            return Value(turned.name, tensor_type(kind, shape))
        whole = self.apply(scope, "ReduceMax", [source], keepdims=0)[0]
        wide = self.apply(scope, "Expand", [whole, self.store(scope, "tensor(int64)", list(shape))])[0]
        return Value(wide.name, tensor_type(kind, shape))

    def any(self, scope: Scope, kinds: Sequence[str], rank: int = 0) -> Value:
        """A value of one of these types and at least this rank, with no dimension of zero; preferably a float32."""
        kind = self.pick(kinds)
        there = [
            value for value in scope.visible()
            if value.kind == kind and value.shape is not None and len(value.shape) >= rank and 0 not in value.shape
        ]  # fmt: skip
        if there and self.chance(0.85):
            return self.rng.choice(there[-6:])
        return self.fresh(scope, kind, self.rng.choice([shape for shape in SHAPES if len(shape) >= rank]))

    def pick(self, kinds: Sequence[str]) -> str:
        usual = [kind for kind in USUAL if kind in kinds]
        if FLOAT in kinds and not (usual and self.chance(self.exotic)):
            return FLOAT
        return self.rng.choice(usual or sorted(kinds))

    def broadcast(self, scope: Scope, kind: str, base: Value, *, same: bool = False) -> Value:
        """A value that broadcasts to ``base``, or (``same``) has its shape."""
        there = [value for value in scope.visible() if value.kind == kind and value.shape == base.shape]
        if there and base.static and self.chance(0.5):
            return self.rng.choice(there)
        if not base.static:
            if same:
                return base
            return self.shaped(scope, kind, [1] * self.rng.randint(0, len(base.shape or ())))
        shape = [dim or 0 for dim in base.shape or ()]
        if not same and self.chance(0.5):
            shape = [dim if self.chance(0.5) else 1 for dim in shape][self.rng.randint(0, len(shape)) :]
        return self.shaped(scope, kind, shape)

    def sequence(self, scope: Scope, kinds: Sequence[str]) -> Value:
        """A sequence of tensors of shape [2, 3]."""
        usual = [f"seq({kind})" for kind in USUAL if f"seq({kind})" in kinds]
        kind = (
            f"seq({FLOAT})" if f"seq({FLOAT})" in kinds and (not usual or self.chance(0.8)) else self.rng.choice(usual)
        )
        there = [value for value in scope.visible() if value.kind == kind and value.shape == (2, 3)]
        if there and self.chance(0.6):
            return self.rng.choice(there)
        elem = kind[4:-1]
        if self.chance(0.2):
            name = self.name()
            value = Value(name, helper.make_sequence_type_proto(tensor_type(elem, (2, 3))))
            self.main.inputs.append(helper.make_value_info(name, value.type))
            self.main.values.append(value)
            self.feeds[name] = [numbers(self.rng, elem, (2, 3)) for _ in range(2)]
            return value
        return self.apply(scope, "SequenceConstruct", [self.shaped(scope, elem, (2, 3)) for _ in range(2)])[0]

    def optional(self, scope: Scope, kinds: Sequence[str]) -> Value:
        there = [value for value in scope.visible() if value.kind in kinds and value.kind.startswith("optional(")]
        if there and self.chance(0.5):
            return self.rng.choice(there)
        inner = (
            self.any(scope, [FLOAT, "tensor(int64)"])
            if self.chance(0.7)
            else self.sequence(scope, ["seq(tensor(float))"])
        )
        return self.apply(scope, "Optional", [inner])[0]

    # -- nodes -------------------------------------------------------------------------------------------------

    def grow(self, scope: Scope, count: int) -> None:
        """Append random nodes, with what they need."""
        from .bodies import control_flow

        for _ in range(count):
            if scope.depth < 2 and self.chance(0.12):
                usable = [op for op in CONTROL_FLOW if schema_at(op, self.opset) is not None and self.opset >= 11]
                control_flow(self, scope, self.rng.choice(usable or ["If"]))
            else:
                self.node(scope, self.rng.choice(plain_ops(self.opset)))

    def node(self, scope: Scope, op: str) -> None:
        """Append a node of an op by its schema and recipe."""
        schema, row = schema_at(op, self.opset), recipe(op, self.opset)
        assert schema is not None
        if op == "Constant":
            kind = self.rng.choice((FLOAT, FLOAT, "tensor(int64)", "tensor(double)"))
            self.constant(scope, kind, numbers(self.rng, kind, self.rng.choice(SHAPES)))
            return
        self.jumps |= row.jumps
        inputs = self.inputs(scope, schema, row)
        attributes = dict(self.attributes(schema, row))
        made = self.apply(scope, op, inputs, self.outputs(schema, row), **attributes)
        if len(made) > 1 and schema.outputs[-1].option == OPTIONAL and self.chance(0.2):
            self.drop_output(scope, made)

    def drop_output(self, scope: Scope, made: list[Value]) -> None:
        """Leave out the second output of the newest node by an empty name."""
        proto = scope.nodes[-1]
        name = proto.output[1]
        proto.output[1] = ""
        scope.values[:] = [value for value in scope.values if value.name != name]

    def attributes(self, schema: OpSchema, row: Recipe) -> Iterator[tuple[str, Any]]:
        """Those that must be given, and some of those that may; element types only where the schema has them."""
        made = schema.outputs[0].type_str if schema.outputs else ""
        types = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == made), [])
        for name, choices in {**row.must, **row.attr}.items():
            if name not in schema.attributes or (name not in row.must and self.chance(0.5)):
                continue
            if name in ("to", "dtype", "output_datatype") and not made.startswith("S"):
                value = self.rng.choice([elem for elem in choices if KINDS[elem] in types])
            else:
                value = self.rng.choice(choices)
            yield name, tensor("", KINDS[value["elem"]], [value["data"]]) if isinstance(value, dict) else value

    def outputs(self, schema: OpSchema, row: Recipe) -> int:
        if schema.outputs and schema.outputs[-1].option == VARIADIC:
            return row.out or 1
        return self.rng.randint(max(schema.min_output, 1), row.out or len(schema.outputs))

    def inputs(self, scope: Scope, schema: OpSchema, row: Recipe) -> list[Value | None]:
        """Values for all formal inputs; those that are given freely come first, since others take their shape."""
        sets = (row.inputs, *row.also)
        entries = self.rng.choice(sets) if self.chance(0.7) else sets[0]
        formals = list(schema.inputs)
        if formals and formals[-1].option == VARIADIC:
            extra = (
                len(entries) - len(formals) if len(sets) > 1 or "any" not in str(entries) else self.rng.randint(0, 2)
            )
            if schema.name == "Einsum":
                extra = 1
            formals += [formals[-1]] * max(extra, 0)
        wanted = [row.entry(entries, position) for position in range(len(formals))]
        order = sorted(range(len(formals)), key=lambda at: not str(wanted[at]).startswith(("any", "seq", "opt")))
        found: list[Value | None] = [None] * len(formals)
        bound: dict[str, str] = {}
        base: Value | None = None
        for at in order:
            formal, entry = formals[at], wanted[at]
            given = formal.option != OPTIONAL or at in row.need or self.chance(0.6)
            if entry == "-" or not given:
                continue
            kinds = self.kinds(schema, row, formal, bound)
            value = self.value(scope, entry, kinds, base)
            found[at], base = value, base or value
            self.bind(schema, formal, value.kind, bound)
        return found

    def kinds(self, schema: OpSchema, row: Recipe, formal: Any, bound: dict[str, str]) -> list[str]:
        """Types that the input may have, given the inputs that are settled."""
        name = formal.type_str
        if name in bound and formal.is_homogeneous:
            return [bound[name]]
        allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == name), [name])
        if name in row.types:
            allowed = [f"tensor({kind})" for kind in row.types[name] if f"tensor({kind})" in allowed] or allowed
        return list(allowed)

    def bind(self, schema: OpSchema, formal: Any, kind: str, bound: dict[str, str]) -> None:
        bound.setdefault(formal.type_str, kind)
        if kind.startswith("seq(") and schema.name.startswith("Sequence"):
            bound.setdefault("T", kind[4:-1])

    def value(self, scope: Scope, entry: Any, kinds: list[str], base: Value | None) -> Value:  # noqa: PLR0911
        """What an entry of a recipe asks for, in one of these types."""
        tensors = [kind for kind in kinds if kind in ELEMS]
        match entry:
            case "seq" if any(kind.startswith("seq(") for kind in kinds):
                return self.sequence(scope, kinds)
            case "seq":  # Identity before opset 14
                return self.any(scope, tensors)
            case "opt":
                return self.optional(scope, kinds)
            case "any" | "any1" | "any2":
                return self.any(scope, tensors, int(entry[3:] or 0))
            case "~" | "=":
                if base is None:
                    return self.any(scope, tensors)
                return self.broadcast(scope, self.pick(tensors), base, same=entry == "=")
            case str():
                return self.shaped(scope, self.pick(tensors), [int(dim) for dim in entry.split(",") if dim])
            case dict():
                shape = [int(dim) for dim in entry["shape"].split(",")]
                return self.shaped(scope, self.pick(tensors), shape, entry["low"], entry["high"])
        return self.store(scope, self.literal_kind(tensors), entry)

    def literal_kind(self, kinds: list[str]) -> str:
        if len(kinds) == 1:
            return kinds[0]
        return "tensor(int64)" if "tensor(int64)" in kinds and FLOAT not in kinds else self.pick(kinds)
