"""Which precisions of a node the target's kernels leave open, as pins and implications for the cut."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from onnxamp._dtypes import Format, retyped
from onnxamp._ops.facts import op_facts, type_giver
from onnxamp._target.kernels import Binding, Typed, agrees, fails, runs_on
from onnxamp._target.targets import cpu_of, target_of


class Freedom(NamedTuple):
    """The choices that the target's kernels leave for the type parameters of one node.

    Attributes:
        high: parameters that must stay float32.
        implies: pairs (p, q): if p is low, q must be low.
        falls_back: the target has no float32 kernel, so the node runs on CPU.
        only_low: the target has a kernel in low precision, but none in float32.
    """

    high: frozenset[str] = frozenset()
    implies: tuple[tuple[str, str], ...] = ()
    falls_back: bool = False
    only_low: bool = False


def freedom(target: str, op: Typed, params: Sequence[str], low: Format) -> Freedom:
    """Which of a node's float32 parameters ``params`` may be low on the target.

    Tries all 2^k assignments; k is at most 4 in practice. The legal ones are closed under element-wise minimum and
    maximum, which a test verifies for the tables, so pins and pairwise implications describe them exactly.
    """
    if not params:
        return Freedom()
    choices = {
        choice: op._replace(bound=_types(op, params, choice, low))
        for choice in itertools.product((False, True), repeat=len(params))
    }

    def legal(asked: Callable[[str, Typed], bool]) -> frozenset[tuple[bool, ...]]:
        return frozenset(choice for choice, typed in choices.items() if asked(target, typed))

    found, all_high = legal(runs_on), (False,) * len(params)
    falls_back = all_high not in found and not target_of(target).builds
    is_given = op.signature.key in op_facts().dtype_attribute
    if cpu_of(target) != target and (
        not found or (is_given and not target_of(target).limits_types)
    ):
        # ONNX Runtime wraps float16 nodes without a CPU kernel in Casts, unless an attribute determines their type.
        if low.is_wrapped and not is_given:
            return _described(params, legal(_may_be_wrapped) | {all_high}, falls_back=True)
        found = legal(_is_left)
    only_low = falls_back and any(any(choice) for choice in found)
    return _described(params, found | {all_high}, falls_back=falls_back, only_low=only_low)


def _may_be_wrapped(target: str, op: Typed) -> bool:
    """Whether the CPU beside the target runs a float16 node, or a Cast before and behind it in float32."""
    return not any(fails(place, op) for place in (target, cpu_of(target))) and agrees(op)


def _is_left(target: str, op: Typed) -> bool:
    """Whether the target leaves a node to the CPU beside it, which runs it."""
    return fails(target, op) is None and runs_on(cpu_of(target), op)


def _described(
    params: Sequence[str],
    legal: frozenset[tuple[bool, ...]],
    *,
    falls_back: bool,
    only_low: bool = False,
) -> Freedom:
    """The pins and implications that leave the legal choices."""
    high = frozenset(p for i, p in enumerate(params) if not any(choice[i] for choice in legal))
    implies = tuple(
        (params[i], params[j])
        for i, j in itertools.permutations(range(len(params)), 2)
        if params[i] not in high and all(choice[j] for choice in legal if choice[i])
    )
    return Freedom(high, implies, falls_back, only_low)


def _types(op: Typed, params: Sequence[str], choice: Sequence[bool], low: Format) -> Binding:
    """The types of a choice. Output 0 may have that of an input, if an attribute is missing that would give it."""
    types = dict(op.bound)
    for param, is_low in zip(params, choice, strict=True):
        if is_low:
            types[param] = retyped(types[param], low)
    is_given = op.signature.key in op_facts().dtype_attribute
    giver = type_giver(op.proto) if is_given else None
    made, read = op.signature.output(0), None if giver is None else op.signature.input(giver)
    if giver is not None and made is not None and read is not None:
        given = types.get(op.signature.param(read, giver))
        if given is not None:
            types[op.signature.param(made, 0)] = given
    return types
