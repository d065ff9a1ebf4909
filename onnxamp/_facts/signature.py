"""The types that ops take: the ports of a node and the type parameters that bind them, from schemas or the user.

The facts come from the schemas of the installed onnx. Those of ops that onnx does not know (com.microsoft, and old ops
such as LayerNormalization before opset 17) come from ONNX Runtime, which accepts models with them.

The user declares custom ops. A declaration applies within a block of code: graphs that are resolved there treat the op
as if it had a schema. It lists the types that kernels exist for, so a parameter that lists float16 can be low
precision.
"""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import onnx.defs

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    OpsetError,
    suggestion,
)
from onnxamp._base.optional import has_runtime
from onnxamp._base.paths import as_path, cannot_read
from onnxamp._base.public import active_within
from onnxamp._base.records import record
from onnxamp._facts.dtypes import ELEM_NUMBERS

RUNTIME_DOMAINS: Final = (
    "com.microsoft",
    "com.microsoft.nchwc",
    "com.ms.internal.nhwc",
)
"""Domains of ONNX Runtime's own ops, whose schemas onnx lacks."""
_MANY: Final = 1 << 31
"""More ports than a node can have."""


@record
class Port:
    """A formal input or output. Its type is a parameter's name ("T") or a concrete type ("tensor(int64)")."""

    name: str
    type: str
    variadic: bool
    homogeneous: bool
    optional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """Types of one version of an op. Compared and hashed by identity: :func:`lookup` makes one per version."""

    domain: str
    op_type: str
    since: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    params: Mapping[str, frozenset[str]]
    """Type parameter -> the types it admits."""
    has_function: bool
    min_inputs: int
    min_outputs: int
    max_inputs: int
    max_outputs: int
    attributes: Mapping[str, int] | None
    """Attribute -> its type (``AttributeProto.AttributeType``); None if only ONNX Runtime knows the op."""
    required: frozenset[str] = frozenset()
    """Attributes that a node must have."""
    bodies: tuple[int, ...] = ()
    """Opsets for which versions of the function body were written."""
    fixed_bodies: tuple[int, ...] = ()
    """Those opsets whose body does not depend on the node's types and attributes."""
    opset: int = 0
    """The opset at which the op was looked up."""
    declared: bool = False
    """Whether the user declared the op and the types that its kernels take."""

    @property
    def key(self) -> str:
        """The name of the op in tables, see :func:`onnxamp._facts.ops.op_key`."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    @property
    def body(self) -> int | None:
        """The opset of the function body that applies here; None if there is none for this opset."""
        return max(
            (version for version in self.bodies if version <= self.opset), default=None
        )

    def input(self, position: int) -> Port | None:
        """Return the formal of the input at ``position``; a trailing variadic formal covers all further inputs."""
        return _formal(self.inputs, position)

    def output(self, position: int) -> Port | None:
        """Return the formal of the node's output at ``position``."""
        return _formal(self.outputs, position)

    def param(self, port: Port, position: int) -> str:
        """Return the name that binds the port: its parameter, or one name per position for heterogeneous variadics."""
        return port.type if port.homogeneous else f"{port.type}#{position}"


def _formal(ports: tuple[Port, ...], position: int) -> Port | None:
    if position < len(ports):
        return ports[position]
    return ports[-1] if ports and ports[-1].variadic else None


DECLARED: Final[ContextVar[Mapping[tuple[str, str], tuple[Signature, ...]]]] = (
    ContextVar("onnxamp custom ops", default=MappingProxyType({}))
)
"""The custom ops that the user declares, by domain and op type; see :func:`onnxamp._facts.signature.declared_ops`."""


@dataclass(slots=True)
class SignatureBook:
    """Signatures at a model's opset imports; looks each op up once.

    Args:
        opsets: domain -> version, with "" for ai.onnx. A missing domain counts as version 1, and a missing ai.onnx
            as the newest version that onnx knows, because ONNX Runtime loads such files.

    Raises:
        OpsetError: ai.onnx is imported at a version that the installed onnx does not know.
    """

    opsets: Mapping[str, int]
    _declared: Mapping[tuple[str, str], tuple[Signature, ...]] = field(
        default_factory=DECLARED.get
    )
    _found: dict[tuple[str, str], Signature | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        newest = onnx.defs.onnx_opset_version()
        version = self.opsets.get("", newest)
        if version > newest:
            raise OpsetError(
                f"The model needs ai.onnx opset {version}, but the installed onnx {onnx.__version__} knows opsets"
                f" up to {newest}: upgrade onnx."
            )

    def get(self, domain: str, op_type: str) -> Signature | None:
        """Return the signature of the op, or None if no schema is known."""
        domain = "" if domain == "ai.onnx" else domain
        key = (domain, op_type)
        if key not in self._found:
            version = self.opsets.get(domain)
            if version is None:
                version = onnx.defs.onnx_opset_version() if domain == "" else 1
            declared = self._declared.get(key, ())
            own = [row for row in declared if row.since <= version]
            # What the user declares describes the kernels that will run, so it overrides a schema of the same op.
            if own:
                self._found[key] = max(own, key=lambda row: row.since)
            else:
                self._found[key] = lookup(*key, version)
        return self._found[key]


@cache
def lookup(domain: str, op_type: str, version: int) -> Signature | None:
    """Return the signature of an op at an opset version, or None if neither onnx nor ONNX Runtime has a schema."""
    try:
        return _from_onnx(onnx.defs.get_schema(op_type, version, domain), version)
    except onnx.defs.SchemaError:
        pass
    versions = [
        row
        for row in _runtime_schemas().get((domain, op_type), ())
        if row.since <= version
    ]
    return max(versions, key=lambda row: row.since, default=None)


def newer_versions(signature: Signature) -> list[Signature]:
    """Return all later versions of an ai.onnx op that onnx knows, oldest first (for "this works from opset M on")."""
    versions = range(signature.since + 1, onnx.defs.onnx_opset_version() + 1)
    newer = dict[int, Signature]()
    for version in versions:
        known = lookup(signature.domain, signature.op_type, version)
        if known is not None and known.since > signature.since:
            newer[known.since] = known
    return [newer[since] for since in sorted(newer)]


def _from_onnx(schema: onnx.defs.OpSchema, version: int) -> Signature:
    return _read(
        schema,
        inputs=_ports(schema, schema.inputs, "type_str", "is_homogeneous"),
        outputs=_ports(schema, schema.outputs, "type_str", "is_homogeneous"),
        has_function=bool(
            schema.has_function  # type: ignore[attr-defined]
            or schema.has_context_dependent_function  # type: ignore[attr-defined]
        ),
        attributes={name: item.type.value for name, item in schema.attributes.items()},  # type: ignore[attr-defined]
        required=frozenset(
            name for name, item in schema.attributes.items() if item.required
        ),
        bodies=tuple(schema.all_function_opset_versions),  # type: ignore[attr-defined]
        fixed_bodies=tuple(schema.function_opset_versions),  # type: ignore[attr-defined]
        opset=version,
    )


@cache
def _runtime_schemas() -> Mapping[tuple[str, str], Sequence[Signature]]:
    """Return ONNX Runtime's schemas by (domain, op type), from the installed version or else this package's copy."""
    return installed_schemas() if has_runtime() else stored_schemas()


def installed_schemas() -> Mapping[tuple[str, str], Sequence[Signature]]:
    """Return the schemas of the installed ONNX Runtime. They are read from the library, without a session."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: PLC0415 - costs 0.1 s, rarely needed

    signatures: dict[tuple[str, str], list[Signature]] = {}
    for schema in state.get_all_operator_schema():
        row = _read(
            schema,
            inputs=_ports(schema, schema.inputs, "typeStr", "isHomogeneous"),
            outputs=_ports(schema, schema.outputs, "typeStr", "isHomogeneous"),
            has_function=False,
            attributes=None,
        )
        signatures.setdefault((schema.domain, schema.name), []).append(row)
    return signatures


def stored_schemas() -> Mapping[tuple[str, str], Sequence[Signature]]:
    """Return the schemas of ONNX Runtime's own ops in ``_data/runtime_schemas.json`` (``scripts/make_schemas.py``)."""
    file = resources.files("onnxamp").joinpath("_data/runtime_schemas.json")
    text = file.read_text("utf-8")
    signatures: dict[tuple[str, str], list[Signature]] = {}
    for row in json.loads(text)["schemas"]:
        signature = Signature(
            domain=row["domain"],
            op_type=row["op"],
            since=row["since"],
            inputs=tuple(Port(*port) for port in row["inputs"]),
            outputs=tuple(Port(*port) for port in row["outputs"]),
            params={name: frozenset(types) for name, types in row["params"].items()},
            has_function=False,
            min_inputs=row["least"][0],
            min_outputs=row["least"][1],
            max_inputs=row["most"][0],
            max_outputs=row["most"][1],
            attributes=None,
        )
        key = (signature.domain, signature.op_type)
        signatures.setdefault(key, []).append(signature)
    return signatures


def _read(schema: Any, **more: Any) -> Signature:
    """Return the signature of a schema of onnx or ONNX Runtime, whose classes are alike."""
    return Signature(
        domain=schema.domain,
        op_type=schema.name,
        since=schema.since_version,
        params={
            row.type_param_str: frozenset(row.allowed_type_strs)
            for row in schema.type_constraints
        },
        min_inputs=schema.min_input,
        min_outputs=schema.min_output,
        max_inputs=schema.max_input,
        max_outputs=schema.max_output,
        **more,
    )


def _ports(schema: Any, formals: Any, kind: str, homogeneous: str) -> tuple[Port, ...]:
    """Return the ports of a schema; the last two arguments are its library's names for two of their attributes."""
    options = type(schema).FormalParameterOption
    return tuple(
        Port(
            formal.name,
            getattr(formal, kind),
            formal.option == options.Variadic,
            getattr(formal, homogeneous),
            formal.option == options.Optional,
        )
        for formal in formals
    )


@dataclass(frozen=True, slots=True)
class CustomOp:
    """The types of a custom op.

    Attributes:
        domain: the op's domain, which is not ONNX's own.
        type: the op type.
        inputs: a type per input: an element type ("int64") or a name in ``types``. "T?" is an optional input, and a
            final "T..." stands for any number of further inputs.
        outputs: likewise.
        types: name -> the element types that kernels take: "float", "float16", "bfloat16", "int64", ... If float and
            float16 are among them, float32 may become float16.
        since: the first version of the domain's opset to which the declaration applies.

    Raises:
        ArgumentError: a type is unknown, or the domain is ONNX's own.
        ArgumentTypeError: a value has the wrong type.

    Example:
        >>> import onnxamp
        >>> op = onnxamp.CustomOp("com.example", "Norm", inputs=["T", "float"], outputs=["T"],
        ...                       types={"T": ["float", "float16"]})
        >>> op.types["T"]
        ('float', 'float16')
    """

    domain: str
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: int = 1

    def __post_init__(self) -> None:
        texts = {"domain": self.domain, "type": self.type}
        if bad := [
            name
            for name, value in texts.items()
            if not isinstance(value, str) or not value
        ]:
            raise ArgumentTypeError(
                f"A custom op needs a {bad[0]}, given as a string."
            )
        if self.domain == "ai.onnx":
            raise ArgumentError(
                f"{self.type} is declared for ai.onnx, whose ops ONNX itself defines: use a domain of your own."
            )
        if (
            isinstance(self.since, bool)
            or not isinstance(self.since, int)
            or self.since < 1
        ):
            raise ArgumentError(
                f"{self.key}: since must be a whole number of at least 1, not {self.since!r}."
            )
        if not isinstance(self.types, Mapping):
            raise ArgumentTypeError(
                f"{self.key}: types must be lists of element types by name."
            )
        types = {
            name: tuple(map(self._element, self._list(f"types.{name}", given)))
            for name, given in self.types.items()
        }
        values = {
            name: tuple(self._list(name, getattr(self, name)))
            for name in ("inputs", "outputs")
        }
        # The dataclass is frozen, and callers may pass lists.
        object.__setattr__(self, "types", types)
        for name, ports in values.items():
            object.__setattr__(self, name, ports)
            for position, port in enumerate(ports):
                if port.endswith("...") and position < len(ports) - 1:
                    raise ArgumentError(
                        f"{self.key}: only the last of the {name} can be {port!r}."
                    )
                self._port(port)

    @property
    def key(self) -> str:
        """The name of the op in tables and lists."""
        return f"{self.domain}::{self.type}"

    def signature(self) -> Signature:
        """Return the declaration in the form of a schema."""
        inputs = tuple(map(self._port, self.inputs))
        outputs = tuple(map(self._port, self.outputs))
        params = dict[str, frozenset[str]]()
        for name, elements in self.types.items():
            params[name] = frozenset(f"tensor({element})" for element in elements)
        return Signature(
            domain=self.domain,
            op_type=self.type,
            since=self.since,
            inputs=inputs,
            outputs=outputs,
            params=params,
            has_function=False,
            min_inputs=_least(inputs),
            min_outputs=_least(outputs),
            max_inputs=_most(inputs),
            max_outputs=_most(outputs),
            attributes=None,
            declared=True,
        )

    def _list(self, what: str, given: Any) -> Iterable[str]:
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ArgumentTypeError(
                f"{self.key}: {what} must be a list of types, not {type(given).__name__}."
            )
        listed = list(given)
        if not all(isinstance(item, str) for item in listed):
            raise ArgumentTypeError(f"{self.key}: {what} must hold strings.")
        return listed

    def _element(self, kind: str) -> str:
        """Return ONNX's name of an element type, which may also be written as NumPy or schemas do."""
        name = (
            {"float32": "float", "float64": "double"}.get(kind, kind)
            .removeprefix("tensor(")
            .removesuffix(")")
        )
        if name not in ELEM_NUMBERS:
            raise ArgumentError(
                f"{self.key}: unknown element type {kind!r}; known are {', '.join(ELEM_NUMBERS)}."
            )
        return name

    def _port(self, written: str) -> Port:
        """Return the port for a type as it is declared: "T", "int64", "T?" or "T..."."""
        name = written.removesuffix("...").removesuffix("?")
        kind = name if name in self.types else f"tensor({self._element(name)})"
        return Port(
            "",
            kind,
            written.endswith("..."),
            homogeneous=True,
            optional=written.endswith("?"),
        )


def _least(ports: Sequence[Port]) -> int:
    """Return the number of ports that a node must have."""
    return sum(not port.optional and not port.variadic for port in ports)


def _most(ports: Sequence[Port]) -> int:
    """Return the number of ports that a node may have."""
    return _MANY if ports and ports[-1].variadic else len(ports)


CustomOpsLike: TypeAlias = (
    str
    | PathLike[str]
    | CustomOp
    | Mapping[str, Any]
    | Iterable[CustomOp | Mapping[str, Any]]
)
"""A TOML file of declarations, or the declarations themselves: CustomOps, or dicts of their attributes."""


def custom_ops_of(given: CustomOpsLike | None) -> tuple[CustomOp, ...]:
    """Return the declarations that an argument specifies.

    Raises:
        ArgumentError: the file cannot be read, or a declaration is wrong.
        ArgumentTypeError: the argument has another type.
    """
    if given is None:
        return ()
    if isinstance(given, (str, PathLike)):
        return _read_declarations(as_path(given))
    listed = [given] if isinstance(given, (CustomOp, Mapping)) else given
    if not isinstance(listed, Iterable):
        raise ArgumentTypeError(
            f"custom_ops must be a TOML file or CustomOps, not {type(given).__name__}."
        )
    return tuple(
        item if isinstance(item, CustomOp) else _declared(item) for item in listed
    )


def as_json(ops: Iterable[CustomOp]) -> list[dict[str, Any]]:
    """Return declarations as JSON values, for :func:`custom_ops_of`."""
    return [asdict(op) for op in ops]


@contextmanager
def declared_ops(given: CustomOpsLike | None) -> Iterator[None]:
    """Make these ops known to graphs that are resolved in the block, in addition to those of enclosing blocks."""
    declared = dict(DECLARED.get())
    for op in custom_ops_of(given):
        key = (op.domain, op.type)
        declared[key] = (*declared.get(key, ()), op.signature())
    with active_within(DECLARED, declared):
        yield


def _read_declarations(path: Path) -> tuple[CustomOp, ...]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_read(f"the custom ops {str(path)!r}", error) from None
    except ValueError as error:  # invalid TOML or UTF-8
        raise ArgumentError(f"{str(path)!r} is not TOML: {error}.") from None
    rows = data.get("op")
    if not isinstance(rows, list) or len(data) > 1:
        raise ArgumentError(
            f"{str(path)!r} holds no custom ops: write each as a table [[op]], and nothing else."
        )
    try:
        return tuple(map(_declared, rows))
    except (ArgumentError, ArgumentTypeError) as error:
        raise ArgumentError(f"{str(path)!r}: {error}") from None


def _declared(row: Any) -> CustomOp:
    names = [item.name for item in fields(CustomOp)]
    if not isinstance(row, Mapping):
        raise ArgumentTypeError(
            f"A custom op must be a CustomOp or a dict, not {type(row).__name__}."
        )
    if unknown := sorted(map(str, row.keys() - set(names))):
        raise ArgumentError(
            f"A custom op has no {unknown[0]!r}: choose from {', '.join(names)}.{suggestion(names, unknown[0])}"
        )
    if missing := [name for name in names[:4] if name not in row]:
        raise ArgumentError(
            f"The custom op {row.get('type', '')!r} lacks {missing[0]!r}."
        )
    return CustomOp(**row)
