"""Types in an op's schema: the ports of a node and the type parameters that bind them.

The facts come from the schemas of the installed onnx. Those of ops that onnx does not know (com.microsoft, and old ops
such as LayerNormalization before opset 17) come from ONNX Runtime, which accepts models with them.
"""

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import onnx.defs

from onnxamp._errors import OpsetError
from onnxamp._optional import has_runtime

RUNTIME_DOMAINS: Final = (
    "com.microsoft",
    "com.microsoft.nchwc",
    "com.ms.internal.nhwc",
)
"""Domains of ONNX Runtime's own ops, whose schemas onnx lacks."""


@dataclass(frozen=True, slots=True)
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
        """The name of the op in tables, see :func:`onnxamp._ops.facts.op_key`."""
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
"""The custom ops that the user declares, by domain and op type; see :func:`onnxamp._ops.custom.declared_ops`."""


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
            own = [row for row in self._declared.get(key, ()) if row.since <= version]
            self._found[key] = (
                max(own, key=lambda row: row.since) if own else lookup(*key, version)
            )
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
    found = (
        lookup(signature.domain, signature.op_type, version) for version in versions
    )
    unique = {
        row.since: row
        for row in found
        if row is not None and row.since > signature.since
    }
    return [unique[since] for since in sorted(unique)]


def _from_onnx(schema: onnx.defs.OpSchema, version: int) -> Signature:
    return _read(
        schema,
        inputs=_ports(schema, schema.inputs, "type_str", "is_homogeneous"),
        outputs=_ports(schema, schema.outputs, "type_str", "is_homogeneous"),
        has_function=bool(schema.has_function or schema.has_context_dependent_function),  # type: ignore[attr-defined]
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

    found: dict[tuple[str, str], list[Signature]] = {}
    for schema in state.get_all_operator_schema():
        row = _read(
            schema,
            inputs=_ports(schema, schema.inputs, "typeStr", "isHomogeneous"),
            outputs=_ports(schema, schema.outputs, "typeStr", "isHomogeneous"),
            has_function=False,
            attributes=None,
        )
        found.setdefault((schema.domain, schema.name), []).append(row)
    return found


def stored_schemas() -> Mapping[tuple[str, str], Sequence[Signature]]:
    """Return the schemas of ONNX Runtime's own ops in ``_data/runtime_schemas.json`` (``scripts/make_schemas.py``)."""
    text = (
        resources.files("onnxamp")
        .joinpath("_data/runtime_schemas.json")
        .read_text("utf-8")
    )
    found: dict[tuple[str, str], list[Signature]] = {}
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
        found.setdefault((signature.domain, signature.op_type), []).append(signature)
    return found


def _read(schema: Any, **more: Any) -> Signature:
    """Return the signature of a schema of onnx or ONNX Runtime, whose classes are alike."""
    return Signature(
        domain=schema.domain,
        op_type=schema.name,
        since=schema.since_version,
        params={
            c.type_param_str: frozenset(c.allowed_type_strs)
            for c in schema.type_constraints
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
