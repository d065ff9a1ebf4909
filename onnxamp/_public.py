"""Public names: the modules that users import them from, and how results show themselves."""

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Shown:
    """A result: in a shell it shows a screen of its report, in a notebook its page. :meth:`to_pandas` takes it apart.

    Reports are made above all data, so results find theirs by its name.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        text: str = _views().as_screen(self)
        return text

    def _repr_html_(self) -> str:
        html: str = _views().as_html(self)
        return html

    def to_pandas(self, table: str = "") -> "pd.DataFrame":
        """Records as a table, with a row for each.

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
        frame: pd.DataFrame = _views().as_frame(self, table)
        return frame


def _views() -> Any:
    return import_module("onnxamp._report.views")


def export(module: str, names: Iterable[str]) -> None:
    """Set ``__module__`` of private classes and functions to the public module that first exports them.

    Tracebacks, ``repr``, pickle and documentation show it.
    """
    members = vars(sys.modules[module])
    for name in names:
        home = getattr(members[name], "__module__", None)
        if isinstance(home, str) and home.startswith("onnxamp") and "._" in home:
            members[name].__module__ = module
