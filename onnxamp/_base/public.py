"""Public names: the modules that users import them from, how results show themselves, and what holds within a block."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import pandas as pd


class Shown:
    """A result that shows itself: a screen of its report in a shell, its page in a notebook, its records as a table."""

    __slots__ = ()

    views: ClassVar[Callable[[], Any]]
    """Gives the module that makes reports of results. The package sets it, since reports are made above all data."""

    def __repr__(self) -> str:
        text: str = Shown.views().as_screen(self)
        return text

    def _repr_html_(self) -> str:
        html: str = Shown.views().as_html(self)
        return html

    def to_pandas(self, table: str = "") -> "pd.DataFrame":
        """Return records as a table, with a row for each.

        Args:
            table: name of the field that holds the records; by default the first that the class has.

        Raises:
            ArgumentError: there is no such field.
            MissingPackageError: pandas is not installed.

        Example:
            >>> import onnxamp
            >>> plan = onnxamp.plan_model("models/encoder.onnx")
            >>> plan.to_pandas().groupby("op")["low"].sum()["MatMul"] > 0  # doctest: +SKIP
            True
        """
        frame: pd.DataFrame = Shown.views().as_frame(self, table)
        return frame


def export(module: str, names: Iterable[str]) -> None:
    """Set ``__module__`` of private classes and functions to the public module that first exports them.

    Tracebacks, ``repr``, pickle and documentation show it.
    """
    members = vars(sys.modules[module])
    for name in names:
        home = getattr(members[name], "__module__", None)
        # Names that another public module has exported keep that module, and those of other packages theirs.
        if isinstance(home, str) and home.startswith("onnxamp") and "._" in home:
            members[name].__module__ = module


T = TypeVar("T")


@contextmanager
def active_within(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Give a context variable a value for the length of a ``with`` block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause the collection of reference cycles. Pauses nest; also usable as a decorator.

    An analysis creates millions of objects and hardly any cycles, but each collection visits all of them: a third of
    the time of a large model. Reference counting still frees objects; only cycles wait.

    The collector serves all threads. Only a pause that finds it enabled disables and re-enables it, so that it never
    stays disabled, in whatever order threads begin and end their pauses. The pause that disabled it may end before
    those of other threads, which then run more slowly.
    """
    pauses = gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Let the collector take all objects for old ones, without a visit to each.

    The next collection would otherwise begin with what was created during a pause, nearly all of which is in use.
    """
    # What the application froze would be thawed as well.
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
