"""Why a result is not put in its place."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxamp._numerics.results import DiffReport


class RefusedError(Exception):
    """A result that failed its validation, before it was put in its place; ``fault`` is why it does not load."""

    def __init__(self, report: "DiffReport", casts: int, fault: str = "") -> None:
        super().__init__()
        self.report = report
        self.casts = casts
        self.fault = fault


class NotWorthError(Exception):
    """A result that passes, but does not pay; ``why`` says so in a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why
