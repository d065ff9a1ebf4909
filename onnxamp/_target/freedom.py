"""Which precisions of a node the target's kernels leave open, as pins and implications for the cut."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from onnxamp._dtypes import Format, retyped
from onnxamp._ops.facts import op_facts, type_giver
from onnxamp._ops.signature import Signature
from onnxamp._target.kernels import Binding, agrees, fails, runs_on
from onnxamp._target.targets import cpu_of, target_of


@dataclass(frozen=True, slots=True)
class Freedom:
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


def freedom(
    target: str,
    key: str,
    signature: Signature,
    bound: Binding,
    params: Sequence[str],
    low: Format,
    proto: NodeProto,
) -> Freedom:
    """Which of a node's float32 parameters ``params`` may be low on the target.

    Tries all 2^k assignments; k is at most 4 in practice. The legal ones are closed under element-wise minimum and
    maximum, which a test verifies for the tables, so pins and pairwise implications describe them exactly.
    """
    if not params:
        return Freedom()
    legal = _legal(
        provider=target,
        key=key,
        signature=signature,
        bound=bound,
        params=params,
        low=low,
        proto=proto,
    )
    everything_high = (False,) * len(params)
    falls_back = everything_high not in legal and not target_of(target).builds
    typed_by_attribute = key in op_facts().dtype_attribute
    if cpu_of(target) != target and (
        not legal or (typed_by_attribute and not target_of(target).limits_types)
    ):
        # ONNX Runtime wraps float16 nodes without a CPU kernel in Casts, unless an attribute determines their type.
        if low.is_wrapped and not typed_by_attribute:
            wrapped = _legal(
                provider=target,
                key=key,
                signature=signature,
                bound=bound,
                params=params,
                low=low,
                proto=proto,
                asked=_may_be_wrapped,
            )
            return _described(params, wrapped | {everything_high}, falls_back=True)
        legal = _legal(
            provider=target,
            key=key,
            signature=signature,
            bound=bound,
            params=params,
            low=low,
            proto=proto,
            asked=_is_left,
        )
    only_low = falls_back and any(any(choice) for choice in legal)
    return _described(params, legal | {everything_high}, falls_back=falls_back, only_low=only_low)


def _may_be_wrapped(
    target: str, key: str, signature: Signature, bound: Binding, proto: NodeProto
) -> bool:
    """Whether the CPU beside the target runs a float16 node, or a Cast before and behind it in float32."""
    is_failing = any(
        fails(place, key, signature, bound, proto) for place in (target, cpu_of(target))
    )
    return not is_failing and agrees(key, signature, bound, proto)


def _is_left(target: str, key: str, signature: Signature, bound: Binding, proto: NodeProto) -> bool:
    """Whether the target leaves a node to the CPU beside it, which runs it."""
    is_failing = fails(target, key, signature, bound, proto) is not None
    return not is_failing and runs_on(cpu_of(target), key, signature, bound, proto)


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


def _legal(
    provider: str,
    key: str,
    signature: Signature,
    bound: Binding,
    params: Sequence[str],
    low: Format,
    proto: NodeProto,
    asked: Callable[[str, str, Signature, Binding, NodeProto], bool] = runs_on,
) -> frozenset[tuple[bool, ...]]:
    given = _given(key, signature, proto)
    choices = itertools.product((False, True), repeat=len(params))
    return frozenset(
        choice
        for choice in choices
        if asked(provider, key, signature, _choose(bound, params, choice, low, given), proto)
    )


def _choose(
    bound: Binding,
    params: Sequence[str],
    choice: Sequence[bool],
    low: Format,
    given: tuple[str, str] | None,
) -> dict[str, str]:
    """The types of a choice; ``given`` as from :func:`_given`."""
    lowered = {
        param: retyped(bound[param], low)
        for param, is_low in zip(params, choice, strict=True)
        if is_low
    }
    types = {**bound, **lowered}
    return types if given is None or given[1] not in types else {**types, given[0]: types[given[1]]}


def _given(key: str, signature: Signature, proto: NodeProto) -> tuple[str, str] | None:
    """The parameters of output 0 and of the input that gives it its type, if an attribute is missing that would."""
    giver = type_giver(proto) if key in op_facts().dtype_attribute else None
    made, read = signature.output(0), None if giver is None else signature.input(giver)
    return (
        None
        if giver is None or made is None or read is None
        else (signature.param(made, 0), signature.param(read, giver))
    )
