"""Answers that are computed once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

P = ParamSpec("P")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Asked:
    """What analyses can be asked about, as passes ask MLIR's analysis manager. It never changes, nor do the answers."""

    _answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def ask(
        self, analysis: Callable[Concatenate[Self, P], Answer], *args: P.args, **keywords: P.kwargs
    ) -> Answer:
        """What ``analysis(self, ...)`` returns; it runs once for each set of further arguments, which are hashable."""
        key = analysis, args, tuple(sorted(keywords.items()))
        if key not in self._answers:
            self._answers[key] = analysis(self, *args, **keywords)
        answer: Answer = self._answers[key]
        return answer
