"""Whether a conversion pays: the size of the file and the estimated time, and the options that do better."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis, analyze
from onnxamp._convert.estimate import SpeedUp, expected_speed_up
from onnxamp._decide.verdicts import Reason
from onnxamp._facts.dtypes import FLOAT32_BYTES
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT
from onnxamp._options.options import Options
from onnxamp._options.values import Level

_LARGER: Final = 1.05
_LARGER_BYTES: Final = 4096
"""A file is larger if it exceeds the original by this factor and by this many bytes: Casts alone need less."""
_SLOWER: Final = 0.995
"""The speed-up below which a result counts as slower: what rounds to 1.00 is as fast."""
_FASTER: Final = 2 - _SLOWER
"""The speed-up from which options are proposed: what rounds to 1.00 gains nothing."""
_WORTH_STORING: Final = 0.1
"""The share of a file that storing weights in low precision must save to be proposed."""

SLOWER: Final = "but slower by the estimate"
"""The start of the clause about a result that is slower, and not larger."""


class Proposal(NamedTuple):
    """Options that give a better result, and their effect in a clause."""

    option: str
    effect: str

    def __str__(self) -> str:
        return f"{self.option} ({self.effect})"


@record
class Worth:
    """The gain of a conversion.

    Attributes:
        before: bytes of the files of the original.
        after: bytes of the files of the result.
        speed_up: the estimated gain; None if there is no estimate.
    """

    before: int
    after: int
    speed_up: SpeedUp | None

    @property
    def is_larger(self) -> bool:
        """Whether the result is larger than the original."""
        return self.after > max(_LARGER * self.before, self.before + _LARGER_BYTES)

    @property
    def is_slower(self) -> bool:
        """Whether the result is slower than the original, by the estimate."""
        return self.speed_up is not None and self.speed_up.factor < _SLOWER

    @property
    def is_pointless(self) -> bool:
        """Whether the result is larger, and no faster as far as is known."""
        return self.is_larger and (self.speed_up is None or self.speed_up.factor <= 1)

    @property
    def drawback(self) -> str:
        """What is worse than in the original, in a clause for a headline; "" if nothing is."""
        if self.is_pointless:
            return "which is not worth it"
        if self.is_larger:
            return f"but larger ({self._share})"
        if self.is_slower and self.speed_up is not None:
            return f"{SLOWER} ({self.speed_up.factor:.2f}×)"
        return ""

    def sentence(self) -> str:
        """Return why the conversion is not worth it, in a sentence; "" if it is."""
        if self.is_larger:
            return self._larger()
        if self.is_slower and self.speed_up is not None:
            return (
                f"By the estimate for {self.speed_up.device}, a run takes {1 / self.speed_up.factor:.2f} times as long as"
                " that of the original."
            )
        return ""

    def _larger(self) -> str:
        """Return how much larger the result is, and what that brings, in a sentence."""
        size = f"The result takes {self._share} of the original's bytes"
        if self.speed_up is None:
            return f"{size}, and low precision brings no speed there."
        if self.is_pointless:
            return f"{size}, and by the estimate it is no faster ({self.speed_up.factor:.2f}×)."
        return f"{size}."

    @property
    def _share(self) -> str:
        return f"{100 * self.after / max(self.before, 1):.0f} %"  # a file without weights has no bytes of them


def better_choices(
    analysis: Analysis, worth: Worth, shapes: Mapping[str, tuple[int, ...]] | None
) -> tuple[Proposal, ...]:
    """Return options that give a better result than one that is larger or slower, the fastest first.

    Complexity: one solution of the cut for each black-listed op type that occurs, and two more.
    """
    options = analysis.options
    if options.level in (Level.O0, Level.AUTO) or options.weights_only:
        return ()
    return (
        *_faster(analysis, worth, shapes),
        *_stored(analysis, worth),
        Proposal("--level auto", "lowers only what pays, by measurements"),
    )


def _faster(
    analysis: Analysis, worth: Worth, shapes: Mapping[str, tuple[int, ...]] | None
) -> Iterator[Proposal]:
    """Yield the options that make the result faster than the original, by the same estimate."""
    if worth.speed_up is None:
        return
    tried = dict[str, float]()
    for spelled, changed in _alternatives(analysis):
        other = expected_speed_up(analyze(analysis.graph, changed), shapes)
        if other is not None and other.factor > max(worth.speed_up.factor, _FASTER):
            tried[spelled] = other.factor
    for spelled, factor in sorted(tried.items(), key=_by_gain):
        yield Proposal(spelled, f"{factor:.2f}×")


def _by_gain(item: tuple[str, float]) -> tuple[float, str]:
    return -item[1], item[0]


def _alternatives(analysis: Analysis) -> Iterator[tuple[str, Options]]:
    """Yield options that a user may prefer: a shorter black list, or inputs and outputs in low precision."""
    options = analysis.options
    listed = sorted(_kept_by_list(analysis))
    sets = [[op] for op in listed]
    if len(listed) > 1:
        sets.append(listed)
    for ops in sets:
        white = (*options.white_list, *ops)
        yield (
            " ".join(f"--white {op}" for op in ops),
            replace(options, white_list=white),
        )
    if options.keep_io_types is not False:
        yield "--io-types low", replace(options, keep_io_types=False)


def _kept_by_list(analysis: Analysis) -> set[str]:
    """Return the op types that the preset's black list keeps in float32."""
    graph = analysis.graph
    verdicts = analysis.pins.verdicts.values()
    variables = analysis.ports.variables
    black = (
        verdict
        for verdict in verdicts
        if verdict.reason is Reason.BLACK and not verdict.low
    )
    # Variables of constants belong to no node.
    nodes = {variables[one.variable].node for one in black} - {ABSENT}
    keys = {node.key for node in graph.at(nodes)}
    return keys & (analysis.options.black - analysis.options.user_black)


def _stored(analysis: Analysis, worth: Worth) -> Iterator[Proposal]:
    """Yield storing weights in low precision, if that makes the file smaller."""
    graph = analysis.graph
    halved = (elements(graph.shapes[value]) for value in graph.constants.tensors)
    saved = sum(halved) * (FLOAT32_BYTES - analysis.options.low.bytes)
    # A model that is raised to float32 first has such weights already.
    is_raised = analysis.options.from_dtype is not None
    if not is_raised and saved > _WORTH_STORING * worth.before:
        yield Proposal("--weights-only", "half the weights, at the original's speed")
