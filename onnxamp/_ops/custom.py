"""Custom ops that the user declares: their ports, type parameters, and the types that their kernels take.

A declaration applies within a block of code: graphs that are resolved there treat the op as if it had a schema. It
lists the types that kernels exist for, so a parameter that lists float16 can be low precision.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

from onnxamp._dtypes import ELEM_NUMBERS
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._ops.signature import DECLARED, Port, Signature
from onnxamp._paths import as_path, cannot_read
from onnxamp._public import active_within

_MANY: Final = 1 << 31
"""More ports than a node can have."""


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
            raise ArgumentTypeError(f"A custom op needs a {bad[0]}, given as a string.")
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
        ports = [tuple(map(self._port, given)) for given in (self.inputs, self.outputs)]
        least = [
            sum(not port.optional and not port.variadic for port in given)
            for given in ports
        ]
        most = [
            _MANY if given and given[-1].variadic else len(given) for given in ports
        ]
        params = {
            name: frozenset(f"tensor({kind})" for kind in kinds)
            for name, kinds in self.types.items()
        }
        return Signature(
            domain=self.domain,
            op_type=self.type,
            since=self.since,
            inputs=ports[0],
            outputs=ports[1],
            params=params,
            has_function=False,
            min_inputs=least[0],
            min_outputs=least[1],
            max_inputs=most[0],
            max_outputs=most[1],
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
        name = written.removesuffix("...").removesuffix("?")
        kind = name if name in self.types else f"tensor({self._element(name)})"
        return Port(
            "",
            kind,
            written.endswith("..."),
            homogeneous=True,
            optional=written.endswith("?"),
        )


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
        return _read(as_path(given))
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
    found = dict(DECLARED.get())
    for op in custom_ops_of(given):
        found[op.domain, op.type] = (
            *found.get((op.domain, op.type), ()),
            op.signature(),
        )
    with active_within(DECLARED, found):
        yield


def _read(path: Path) -> tuple[CustomOp, ...]:
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
    if unknown := sorted(row.keys() - set(names)):
        raise ArgumentError(
            f"A custom op has no {unknown[0]!r}: choose from {', '.join(names)}."
        )
    if missing := [name for name in names[:4] if name not in row]:
        raise ArgumentError(
            f"The custom op {row.get('type', '')!r} lacks {missing[0]!r}."
        )
    return CustomOp(**row)
