"""Libraries of custom ops, which sessions of a block of code register, and their declarations with them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._ops.custom import CustomOpsLike, declared_ops
from onnxamp._ops.signature import DECLARED
from onnxamp._optional import require_runtime
from onnxamp._public import active_within

if TYPE_CHECKING:
    import onnxruntime as ort

LibrariesLike: TypeAlias = str | PathLike[str] | Iterable[str | PathLike[str]]
"""The path of a shared library, or several."""

_LIBRARIES: Final[ContextVar[tuple[str, ...]]] = ContextVar(
    "onnxamp custom op libraries", default=()
)


@contextmanager
def custom_ops(
    declared: CustomOpsLike | None = None, *, library: LibrariesLike = ()
) -> Iterator[None]:
    """Let everything in a block of code know and run custom ops.

    Args:
        declared: what their types are: a TOML file, a :class:`CustomOp`, a dict of its attributes, or a list of these.
            Ops that are not declared stay float32.
        library: shared libraries with their kernels, built for ONNX Runtime (``RegisterCustomOps``). All sessions in
            the block register them, those of worker processes, too. Their code runs in these processes as soon as they
            are named: name only libraries that you trust.

    Raises:
        ArgumentError: a declaration is wrong, or a library cannot be loaded.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import onnxamp
        >>> norm = {"domain": "com.example", "type": "Norm", "inputs": ["T"], "outputs": ["T"],
        ...         "types": {"T": ["float", "float16"]}}
        >>> with onnxamp.custom_ops(norm):
        ...     plan = onnxamp.plan_model("models/encoder.onnx")
    """
    with (
        declared_ops(declared),
        active_within(_LIBRARIES, (*_LIBRARIES.get(), *_checked(library))),
    ):
        yield


def active_libraries() -> tuple[str, ...]:
    """The libraries that sessions register here, for another process."""
    return _LIBRARIES.get()


class Surroundings(NamedTuple):
    """The custom ops that a block of code knows and runs, for another process."""

    declared: Mapping[Any, Any]
    libraries: tuple[str, ...]

    @classmethod
    def here(cls) -> "Surroundings":
        """Those of the present block."""
        return cls(dict(DECLARED.get()), _LIBRARIES.get())

    def enter(self) -> None:
        """Make them those of this process."""
        DECLARED.set(self.declared)
        _LIBRARIES.set(self.libraries)


def register_libraries(options: "ort.SessionOptions") -> None:
    """Register the libraries of the block with a session."""
    for path in _LIBRARIES.get():
        options.register_custom_ops_library(path)


def _checked(library: LibrariesLike) -> tuple[str, ...]:
    listed = [library] if isinstance(library, (str, PathLike)) else library
    if not isinstance(listed, Iterable):
        raise ArgumentTypeError(
            f"library must be a path or a list of paths, not {type(library).__name__}."
        )
    paths = [Path(fspath(path)).absolute() for path in listed]
    for path in paths:
        if not path.is_file():
            raise ArgumentError(f"There is no library {str(path)!r}.")
        _load(path)
    return tuple(dict.fromkeys(map(str, paths)))


def _load(path: Path) -> None:
    """Check before anything runs that ONNX Runtime can load a library."""
    require_runtime()
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(
            "."
        )
        raise ArgumentError(
            f"ONNX Runtime cannot load custom ops from {str(path)!r}: {text}."
        ) from error
