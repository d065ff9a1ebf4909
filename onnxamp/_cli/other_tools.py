"""What takes the place of other tools' options, for those who type them here."""

from collections.abc import Iterator, Sequence

from onnxamp._ops.tables import read_table


def told_of_other_tools(arguments: Sequence[str], unknown: str | None) -> str | None:
    """Return what takes the place of an option that is another tool's; None if it is none.

    Args:
        arguments: what was typed.
        unknown: the option that is unknown; None if something else is wrong, as where "-ope" was taken for "-o pe".
    """
    typed = [text.partition("=")[0] for text in arguments]
    known = [text for text in typed if _is_word(text) and any(_meanings(text))]
    name = next(iter(known), unknown) if unknown is None or len(unknown) == len("-n") else unknown
    meanings: dict[str, list[str]] = {}
    for tool, meaning in _meanings(name or ""):
        meanings.setdefault(meaning, []).append(tool)
    if not meanings:
        return None
    return " ".join(_sentence(name or "", meaning, tools) for meaning, tools in meanings.items())


def _is_word(text: str) -> bool:
    """Whether a text is like "-ne", which is taken for two options of one letter."""
    return len(text) > len("-n") and text.startswith("-") and not text.startswith("--")


def _meanings(name: str) -> Iterator[tuple[str, str]]:
    for tool, row in read_table("other_tools").items():
        if name in row["options"]:
            yield tool, row["options"][name]


def _sentence(name: str, meaning: str, tools: Sequence[str]) -> str:
    *others, last = (f"{tool}'s" for tool in tools)
    owners = f"{', '.join(others)} and {last}" if others else last
    if meaning.startswith("nothing"):
        return f"{owners} {name} has no counterpart here{meaning.removeprefix('nothing')}."
    return f"{owners} {name} is onnxamp's {meaning}."
