"""Gradients of attention, and of the rotation of queries and keys.

Attention of ONNX Runtime follows its formula: the weights are computed again, and masks are by position. Heads that
share keys and values lie along an axis of their own: queries are [batch, shared heads, group, length, size], keys and
values have a group of 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from onnx import TensorProto

from onnxamp._gradients.writer import Call, Grads, Rule, Tensor, sum_to

_NOWHERE: Final = 1 << 62
"""The end of a slice that has none, and the position of a row of a cache that holds nothing."""
_HIDDEN: Final = -1e30
"""The score of a key that the query does not see."""
_PAST: Final = (3, 4)
_LENGTHS: Final = 5
_ANGLES: Final = 7
"""Positions of inputs of GroupQueryAttention: the old cache, tokens less one, and tables of angles."""
_BIAS: Final = 3
_PADDING: Final = 4
_SCORES: Final = 5
_OLD: Final = (6, 7)
"""Those of MultiHeadAttention: biases, mask, addends of scores, and the old cache."""


class _Attention(NamedTuple):
    """The gradients of queries, keys, values and the addends of scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor

    @classmethod
    def of(
        cls,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dy: Tensor,
        scale: float,
        softcap: float = 0.0,
        bias: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> "_Attention":
        """Write the gradients, from that of the result. A ``scale`` of 0 stands for 1 / sqrt(size)."""
        factor = query.like(scale)
        if not scale:
            factor = query.op("Shape", start=4).cast(query.elem).op("Sqrt")
            factor = factor.op("Reciprocal")
        scores = query.op("MatMul", _turned(key)) * factor
        slope = factor
        if softcap:
            capped = (scores / softcap).op("Tanh")
            scores = capped * softcap
            slope = (1 - capped * capped) * factor
        if bias is not None:
            scores = scores + bias
        if visible is not None:
            scores = visible.where(scores, _HIDDEN)
        weights = scores.op("Softmax", axis=-1)
        change = dy.op("MatMul", _turned(value))
        # The gradient of a softmax: each score moves its own weight up, and all weights of the row down.
        change = weights * (change - (weights * change).sum([-1]))
        step = change * slope
        return cls(
            step.op("MatMul", key),
            _turned(step).op("MatMul", query).sum([2]),
            _turned(weights).op("MatMul", dy).sum([2]),
            change,
        )


def _turned(x: Tensor) -> Tensor:
    """Return a tensor of five axes with the last two swapped."""
    return x.transpose([0, 1, 2, 4, 3])


class _Rotation(NamedTuple):
    """The rotation of pairs of elements by angles that depend on their position.

    ``cos`` and ``sin`` are the whole tables, and ``places`` the rows of [batch, length] that are used.
    """

    cos: Tensor
    sin: Tensor
    places: Tensor
    size: int
    is_interleaved: bool

    @classmethod
    def of(
        cls, call: Call, tables: int, places: Tensor, interleaved: str
    ) -> "_Rotation":
        """Return the rotation by the tables at two inputs of a node.

        Raises:
            GradientError: their size is unknown.
        """
        half = None if call[tables].dims is None else call[tables].known_size(1)
        if half is None:
            raise call.error("has tables of angles of unknown size")
        apart = bool(call.attribute(interleaved, 0))
        return cls(call[tables], call[tables + 1], places, 2 * half, apart)

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second elements of all pairs."""
        last = [-1]
        size = [self.size]
        if self.is_interleaved:
            even = x.op("Slice", [0], size, last, [2])
            odd = x.op("Slice", [1], size, last, [2])
            return even, odd
        half = [self.size // 2]
        left = x.op("Slice", [0], half, last, [1])
        right = x.op("Slice", half, size, last, [1])
        return left, right

    def turn(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Return what has five axes rotated, or rotated back; elements after ``size`` stay."""
        one, other = self._pairs(x)
        cos, sin = (
            table.op("Gather", self.places).op("Unsqueeze", [1, 2])
            for table in (self.cos, self.sin)
        )
        sin = -sin if back else sin
        pair = [one * cos - other * sin, other * cos + one * sin]
        rest = x.op("Slice", [self.size], [_NOWHERE], [-1])
        if self.is_interleaved:
            joined = x.writer.concat([part.op("Unsqueeze", [-1]) for part in pair], -1)
            pair = [joined.reshape(0, 0, 0, 0, self.size)]
        return x.writer.concat([*pair, rest], -1)

    def tables(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of cosines and sines, from that of what :meth:`turn` makes of ``x``."""
        one, other = self._pairs(x)
        d_one, d_other = self._pairs(dy)
        rows = self.places.op("Unsqueeze", [-1])
        changes = d_one * one + d_other * other, d_other * one - d_one * other
        cos, sin = (
            table.zeros_like().op(
                "ScatterND", rows, change.sum([1, 2], keepdims=False), reduction="add"
            )
            for table, change in zip((self.cos, self.sin), changes, strict=True)
        )
        return cos, sin


def _grouped(x: Tensor, shared: int, group: int = 1) -> Tensor:
    """Return [batch, length, hidden] with heads as axes."""
    by_head = x.reshape(0, 0, shared, group, -1)
    return by_head.transpose([0, 2, 3, 1, 4])


def _merged(x: Tensor) -> Tensor:
    """Return what :func:`_grouped` was given."""
    return x.transpose([0, 3, 1, 2, 4]).reshape(0, 0, -1)


class _Places(NamedTuple):
    """The positions in the sequence that a GroupQueryAttention reads and writes, each of [batch, length].

    ``new`` are the positions of its queries; ``keys`` those of the old cache, if there is one, and of the new keys.
    """

    new: Tensor
    keys: Tensor
    written: Tensor

    @classmethod
    def of(cls, call: Call) -> "_Places":
        """Write the positions, as ONNX Runtime's description of the op says."""
        length = call.x.size(1)
        writer = call.writer
        steps = writer.count(length).op("Unsqueeze", [0])
        until = call[_LENGTHS].cast(TensorProto.INT64).reshape(-1, 1) + 1
        count = writer.vector(length)
        past = (until - count).op("Max", until.like(0))
        new = steps + past
        old = None
        if call.has(_PAST[0]):
            old = _rows(call, past, call[_PAST[0]].size(2))
        present = call.output(1)
        written = (
            new if present is None else _rows(call, past + count, present.size(2))
        )
        keys = new if old is None else writer.concat([old, new], 1)
        return cls(new, keys, written)

    def visible(self, window: int) -> Tensor:
        """Return which keys each query sees: none after it, and if ``window`` is above 0, so many up to itself."""
        query = self.new.op("Unsqueeze", [-1])
        key = self.keys.op("Unsqueeze", [1])
        seen = (key > query).op("Not")
        if window > 0:
            seen = seen.op("And", key > query - window)
        return seen.op("Unsqueeze", [1, 2])

    def through(self, written: Tensor) -> Tensor:
        """Return the gradient of all keys from that of the cache that is written, [batch, heads, length, size]."""
        keys = self.keys.op("Unsqueeze", [-1])
        rows = self.written.op("Unsqueeze", [1])
        same = keys.equals(rows).op("And", rows < _NOWHERE).cast(written.elem)
        moved = same.op("Unsqueeze", [1]).op("MatMul", written)
        return moved.op("Unsqueeze", [2])


def _rows(call: Call, until: Tensor, size: "int | Tensor") -> Tensor:
    """Return the positions of a cache's rows after ``until`` tokens; those of unused rows are beyond all others."""
    writer = call.writer
    held = until
    if call.attribute("sliding_window_cache", 0):
        capacity = writer.vector(call[_PAST[0]].size(2))
        spare = capacity - call.attribute("local_window_size", -1) + 1
        over = (until - capacity).op("Max", until.like(0))
        held = until - spare * ((over + spare - 1) / spare)
    rows = writer.count(size).op("Unsqueeze", [0])
    return (rows < held).where(rows + until - held, _NOWHERE)


def _group_query(call: Call) -> Grads:
    """Return the gradients of GroupQueryAttention, those of its tables of angles included."""
    _check_outputs(call)
    heads, shared = (call.attribute(name) for name in ("num_heads", "kv_num_heads"))
    query, key, value = (
        _grouped(x, shared, group)
        for x, group in zip(_parts(call), (heads // shared, 1, 1), strict=True)
    )
    places = _Places.of(call)
    turn = None
    turned_query = query
    turned_key = key
    if call.attribute("do_rotary", 0):
        rows = call[_ANGLES + 2] if call.has(_ANGLES + 2) else places.new
        turn = _Rotation.of(call, _ANGLES, rows, "rotary_interleaved")
        turned_query = turn.turn(query)
        turned_key = turn.turn(key)
    keys, values = _after_cache(call, (turned_key, value), _PAST)
    grads = _Attention.of(
        query=turned_query,
        key=keys,
        value=values,
        dy=_grouped(call.dy, shared, heads // shared),
        scale=call.attribute("scale", 0.0),
        softcap=call.attribute("softcap", 0.0),
        visible=places.visible(call.attribute("local_window_size", -1)),
    )
    old, new = _apart(call, grads, _PAST, places.through)
    gradients = [grads.query, *new]
    tables = list[Tensor]()
    if turn is not None:
        pairs = [
            turn.tables(*pair) for pair in zip((query, key), gradients, strict=False)
        ]
        tables = [one + other for one, other in zip(*pairs, strict=True)]
        gradients[:2] = (turn.turn(gradient, back=True) for gradient in gradients[:2])
    merged: list[Tensor | None] = [*map(_merged, gradients)]
    if not call.has(1):
        merged = [call.writer.concat([*map(_merged, gradients)], 2), None, None]
    return [*merged, *old, None, None, *tables]


def _check_outputs(call: Call) -> None:
    if any(dy is not None for dy in call.dys[3:]):
        raise call.error(
            "passes its scores on to the loss, which has no gradient rule"
        )


def _parts(call: Call) -> Sequence[Tensor]:
    """Return queries, keys and values of [batch, length, hidden], which may be packed."""
    if call.has(1):
        return [call[at] for at in range(3)]
    heads, shared = (call.attribute(name) for name in ("num_heads", "kv_num_heads"))
    packed = call.x.reshape(0, 0, heads + 2 * shared, -1)
    parts = packed.split([heads, shared, shared], 2)
    return [part.reshape(0, 0, -1) for part in parts]


def _after_cache(
    call: Call, new: Sequence[Tensor], past: Sequence[int]
) -> list[Tensor]:
    """Return keys and values, preceded by those of the old cache if there is one at these inputs."""
    joined = []
    for part, at in zip(new, past, strict=True):
        held = [call[at].op("Unsqueeze", [2])] if call.has(at) else []
        joined.append(call.writer.concat([*held, part], 3))
    return joined


def _apart(
    call: Call,
    grads: _Attention,
    past: Sequence[int],
    through: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Return gradients of the old cache, if there is one, and of new keys and values.

    ``through`` returns the gradient of all keys or values from that of the new cache.
    """
    old = list[Tensor | None]()
    new = list[Tensor]()
    written = (*call.dys[1:3], None, None)
    for gradient, at, dy in zip((grads.key, grads.value), past, written, strict=False):
        total = gradient if dy is None else gradient + through(dy)
        if not call.has(at):
            old.append(None)
            new.append(total)
            continue
        size = call.writer.vector(call[at].size(2))
        before = total.op("Slice", [0], size, [3])
        old.append(before.op("Squeeze", [2]))
        new.append(total.op("Slice", size, [_NOWHERE], [3]))
    return old, new


def _multi_head(call: Call) -> Grads:
    """Return the gradients of MultiHeadAttention."""
    _check_outputs(call)
    is_packed = not (call.has(1) and call.has(2))
    is_padded = call.has(_PADDING) and call.rank(_PADDING) != 2
    if is_packed or is_padded or call.rank() != 3:
        raise call.error("has a form without a gradient rule")
    heads = call.attribute("num_heads")
    parts = [call[at] for at in range(3)]
    if call.has(_BIAS):
        biases = call[_BIAS].split([part.size(-1) for part in parts], 0)
        parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
    is_apart = [call.rank(at) == 4 for at in range(3)]
    query, *new = (
        part.op("Unsqueeze", [2]) if apart else _grouped(part, heads)
        for part, apart in zip(parts, is_apart, strict=True)
    )
    keys, values = _after_cache(call, new, _OLD)
    added = call[_SCORES].op("Unsqueeze", [2]) if call.has(_SCORES) else None
    grads = _Attention.of(
        query=query,
        key=keys,
        value=values,
        dy=_grouped(call.dy, heads),
        scale=call.attribute("scale", 0.0),
        bias=added,
        visible=_seen(call, keys),
    )
    old, new = _apart(call, grads, _OLD, lambda dy: dy.op("Unsqueeze", [2]))
    gradients = [
        gradient.op("Squeeze", [2]) if apart else _merged(gradient)
        for gradient, apart in zip((grads.query, *new), is_apart, strict=True)
    ]

    def biases_gradient() -> Tensor:
        sums = [gradient.sum([0, 1], keepdims=False) for gradient in gradients]
        return call.writer.concat(sums, 0)

    def scores_gradient() -> Tensor:
        return sum_to(grads.bias.op("Squeeze", [2]), None, call[_SCORES])

    return [*gradients, biases_gradient, None, scores_gradient, *old]


def _seen(call: Call, keys: Tensor) -> Tensor | None:
    """Return which keys each query of a MultiHeadAttention sees; None for all."""
    seen = None
    if call.has(_PADDING):
        seen = (call[_PADDING] > 0).op("Unsqueeze", [1, 2, 3])
    if call.attribute("unidirectional", 0):
        all_keys = keys.op("Shape", start=3, end=4)
        length = call.writer.vector(call.x.size(1))
        query = call.writer.count(call.x.size(1)).op("Unsqueeze", [1])
        past = call.writer.count(all_keys).op("Unsqueeze", [0])
        before = (past > query + (all_keys - length)).op("Not")
        seen = before if seen is None else seen.op("And", before)
    return seen


def _rotary(call: Call) -> Grads:
    """Return the gradients of RotaryEmbedding of ONNX Runtime."""
    is_apart = call.rank() == 4
    length = call.x.size(2 if is_apart else 1)
    places = call[1]
    if call.rank(1) == 1:  # the first position of each sequence
        steps = call.writer.count(length).op("Unsqueeze", [0])
        batch = call.writer.vector(call.x.size(0), 1)
        places = (steps + places).op("Expand", batch)
    turn = _Rotation.of(call, 2, places, "interleaved")
    heads = call.attribute("num_heads", 0)

    def split(x: Tensor) -> Tensor:
        if is_apart:
            return x.op("Unsqueeze", [2])
        if heads:
            return _grouped(x, heads)
        by_head = x.reshape(0, 0, -1, 1, turn.size)
        return by_head.transpose([0, 2, 3, 1, 4])

    x = split(call.x)
    dy = split(call.dy)
    back = turn.turn(dy, back=True)
    tables = turn.tables(x, dy)
    return [back.op("Squeeze", [2]) if is_apart else _merged(back), None, *tables]


RULES: Final[Mapping[str, Rule]] = {
    "com.microsoft::GroupQueryAttention": _group_query,
    "com.microsoft::MultiHeadAttention": _multi_head,
    "com.microsoft::RotaryEmbedding": _rotary,
}
