"""How the command line spells the fields of :class:`onnxamp.Options`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CommandLine:
    """How the command line spells an option.

    Attributes:
        flag: the flag, as in "--dtype", or two that mean yes and no, as in "--freeze-defaults/--keep-overridable".
        help: the help text.
        words: the words that the flag takes -> the value that each stands for.
        many: whether the flag can be repeated.
        metavar: what the help shows for the value.
        named: the word that names may follow, as in "keep:mask,logits": the value is then these names.
        kind: the type of a value that is neither a word nor one of many.
    """

    flag: str
    help: str
    words: Mapping[str, Any] | None = None
    many: bool = False
    metavar: str | None = None
    named: str | None = None
    kind: type[int | float | str] = int

    def meaning(self, given: Any) -> Any:
        """The value that the command line's text stands for.

        Raises:
            KeyError: it is no word of the option.
        """
        if self.words is None:
            return given
        word, names, listed = given.partition(":")
        return tuple(filter(None, listed.split(","))) if names and word == self.named else self.words[given]

    def arguments(self, value: Any) -> list[str]:
        """The arguments that stand for a value; none where none do."""
        if self.words is not None:
            word = self._word(value)
            return [] if word is None else [self.flag, word]
        if isinstance(value, bool):
            yes, _, no = self.flag.partition("/")
            return [yes if value else no or yes]
        return [text for item in value for text in (self.flag, item)] if self.many else [self.flag, str(value)]

    def _word(self, value: Any) -> str | None:
        """The word for a value, with its names; None where there is none."""
        word = next((word for word, meant in (self.words or {}).items() if meant == value), None)
        if word is None and self.named and not any("," in name for name in value):
            word = f"{self.named}:{','.join(sorted(value))}"
        return word
