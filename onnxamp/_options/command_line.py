"""Options on the command line: the rows of ``_data/options.toml``, whose head explains their fields.

This module imports little, because help and completion need no more.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from onnxamp._facts.tables import read_table


class OptionRow(NamedTuple):
    """An option or an argument of some commands; ``_data/options.toml`` describes the fields."""

    flags: str
    commands: Sequence[str]
    name: str
    help: str = ""
    more: str = ""
    group: str = ""
    field: str = ""
    type: str = "text"
    choices: Sequence[str] = ()
    metavar: str | None = None
    default: Any = None
    repeats: bool = False
    reads: bool = False
    required: bool = False
    meanings: Mapping[str, Any] = {}
    unset: str | None = None
    named: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any], converting: Sequence[str]) -> "OptionRow":
        """Return a row of the table; the row may omit its commands and its name."""
        # "-o, --output" is called output, and "--fold/--no-fold" fold, as click would name them.
        longest = row["flags"].partition("/")[0].rpartition(" ")[2].lstrip("-")
        name = row.get("field") or longest.lower().replace("-", "_")
        return cls(**{"commands": converting, "name": name, **row})

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the command rather than an option."""
        return not self.flags.startswith("-")

    def meaning(self, given: Any) -> Any:
        """Return the value of the field that the command line's value stands for."""
        if given == self.unset:
            return None
        if self.named and given.startswith(f"{self.named}:"):
            return tuple(filter(None, given.partition(":")[2].split(",")))
        return self.meanings.get(given, given) if self.meanings else given

    def arguments(self, value: Any) -> list[str]:
        """Return the arguments that stand for a value; an empty list if no arguments do."""
        flag, _, no = self.flags.partition("/")
        if self.type == "flag":
            return [flag if value else no or flag]
        words: Iterable[str]
        if self.type == "ranges":
            # The same numbers: a range that is rounded may be narrower.
            words = (
                f"{name}={_exact(low)}:{_exact(high)}" for name, (low, high) in value
            )
        elif self.repeats:
            words = map(str, value)
        else:
            words = filter(None, [self._word(value)])
        arguments = list[str]()
        for word in words:
            arguments += flag, word
        return arguments

    def _word(self, value: Any) -> str | None:
        """Return the word for a value, with its names; None if there is none."""
        for word, meaning in self.meanings.items():
            if meaning == value:
                return word
        if self.named and not any("," in name for name in value):
            return f"{self.named}:{','.join(sorted(value))}"
        return str(value) if isinstance(value, str | int | float) else None


@cache
def option_table() -> dict[str, Any]:
    """Return the whole table: its rows, the texts about commands, and the order of groups."""
    return read_table("options")


@cache
def option_rows() -> tuple[OptionRow, ...]:
    """Return all rows, in the order of the table."""
    table = option_table()
    return tuple(OptionRow.of(row, table["converting"]) for row in table["option"])


@cache
def spelled_fields() -> Mapping[str, OptionRow]:
    """Return the row of each field of Options that the command line can set."""
    return {row.field: row for row in option_rows() if row.field}


def _exact(number: float) -> str:
    """Return a number in as few digits as give it back."""
    return repr(float(number)).removesuffix(".0")
