"""The tables of docs/coming-from.md and docs/coming-from-converters.md, and the tests of their rows."""

import re
from collections.abc import Callable

from repository import ROOT

Test = Callable[[], None]


def rows(*sections: str, page: str = "coming-from") -> list[str]:
    """The first cells of the tables below these headings; those that are equal are numbered."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found: list[str] = []
    for section in text.split("\n## ")[1:]:
        if section.partition("\n")[0] in sections:
            tables = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n?)*)", section, re.MULTILINE)
            lines = [line for table in tables for line in table.splitlines()]
            found += [line.strip("| ").split(" | ")[0] for line in lines]
    return [f"{cell} {found[:i].count(cell) + 1}" if found.count(cell) > 1 else cell for i, cell in enumerate(found)]


class RowTests(dict[str, Test]):
    """Tests by row."""

    def row(self, cell: str) -> Callable[[Test], Test]:
        """A decorator that makes a function the test of a row."""
        assert cell not in self

        def keep(test: Test) -> Test:
            self[cell] = test
            return test

        return keep
