"""Choices that depend on values, in sentences: how many are closer than the error of what they compare."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from onnxamp._base.words import count
from onnxamp._numerics.choices.close_calls import CloseCalls
from onnxamp._numerics.results import DiffReport
from onnxamp._report.parts import Section, hint, notes, section

_NODES: Final = 8
"""Nodes whose choices are described; --format json lists all."""


def choices_section(diff: DiffReport) -> Section:
    """Return how close the choices of a comparison are, on its samples and on inputs that are made to be hard."""
    sentences = [*_sentences(diff.choices)]
    for extra in diff.extras:
        there = _sentences(extra.choices)
        sentences += (f"With {extra.what}: {_lowered(one)}" for one in there)
    if not sentences:
        return section("Choices")
    lead = (
        "Results may differ where numbers nearly tie. That alone fails no validation."
    )
    return section("Choices", hint(lead), notes(sentences))


def _sentences(calls: Sequence[CloseCalls]) -> Iterator[str]:
    """Yield a sentence about each node that makes close choices, those that differ most first, or one about all."""
    close = [call for call in calls if call.close]
    every = sum(call.choices for call in calls)
    if every and not close:
        yield f"None of {count(every, 'choice')} is closer than the error of what it compares."
    close.sort(key=attrgetter("differ", "close"), reverse=True)
    yield from map(_sentence, close[:_NODES])
    if more := close[_NODES:]:
        total = sum(one.close for one in more)
        differ = sum(one.differ for one in more)
        nodes = count(len(more), "more node")
        yield f"{nodes} made {count(total, 'choice')} that are closer than the error; {_differ(differ)}."


def _sentence(one: CloseCalls) -> str:
    """Return how many of a node's choices are close, and how many differ."""
    whose = f"{count(one.choices, 'choice')} of {one.op} node {one.node!r}"
    verb = "is" if one.close == 1 else "are"
    differ = _differ(one.differ)
    return f"{one.close:,} of {whose} {verb} closer than the error; {differ}."


def _differ(number: int) -> str:
    if not number:
        return "none differs"
    return f"{number:,} {'differs' if number == 1 else 'differ'}"


def _lowered(sentence: str) -> str:
    """Return a sentence for the middle of another one."""
    return sentence[0].lower() + sentence[1:]
