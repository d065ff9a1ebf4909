"""LSTM, GRU and RNN written out step by step, for sequences of a known length: plain ops, which have rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from onnxamp.train._gradients.calls import Call
from onnxamp.train._gradients.shapes import dim, static
from onnxamp.train._gradients.writer import Tensor

_GATES: Final = {"GRU": 3, "LSTM": 4, "RNN": 1}
_ACTIVATIONS: Final = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"], "RNN": ["Tanh"]}
"""Number of gates, and the schema's default activations for one direction."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction: its weights, made ready, and what it computes from a step to the next."""

    call: Call
    gates: int
    recurrence: Tensor
    """[hidden, gates * hidden]."""
    bias: Tensor | None
    """[gates * hidden], of a GRU with linear_before_reset; otherwise all biases are in the input's part."""


_State = tuple[Tensor, ...]
"""Hidden state, and the cell state of an LSTM; [batch, hidden] each."""
_Step = Callable[[_Cell, Tensor, _State], _State]


def unroll(call: Call) -> None:
    """Write the node's steps in place of the node, to the same outputs.

    Raises:
        GradientError: the length is not known, or an option has no rule (sequence lengths, peepholes, clipping, other
            activations than the default ones).
    """
    kind, layout = call.proto.op_type, int(call.attribute("layout", 0))
    _check(call)
    x = call.x().op("Transpose", perm=[1, 0, 2]) if layout else call.x()
    length = static(call.x(), layout)
    assert length is not None
    directions = str(call.attribute("direction", "forward"))
    count = 2 if directions == "bidirectional" else 1
    parts = {port: _pieces(call, port, count) for port in (1, 2, 3, 5, 6)}
    rows: list[Tensor] = []
    finals: list[_State] = []
    for index in range(count):
        backward = directions == "reverse" or index == 1
        given = {port: found[index] for port, found in parts.items() if found}
        steps, final = _run(call, kind, x, given, length, backward=backward)
        rows.append(_joined([step.op("Unsqueeze", [0]) for step in steps], 0).op("Unsqueeze", [1]))
        finals.append(final)
    outputs = [_joined(rows, 1)]
    outputs += [_joined([final[i].op("Unsqueeze", [0]) for final in finals], 0) for i in range(len(finals[0]))]
    for port, (made, wanted) in enumerate(zip(outputs, call.outputs, strict=False)):
        if wanted is not None:
            perm = ([2, 0, 1, 3] if port == 0 else [1, 0, 2]) if layout else None
            made.op("Transpose" if layout else "Identity", into=wanted.name, perm=perm)


def _check(call: Call) -> None:
    kind = call.proto.op_type
    layout, directions = int(call.attribute("layout", 0)), str(call.attribute("direction", "forward"))
    if call.has(4):
        raise call.refusal("is given the lengths of its sequences; only sequences of one length have a rule")
    if call.has(7) or call.attribute("input_forget", 0):
        raise call.refusal("has peepholes or couples its gates, for which there is no rule")
    if call.attribute("clip") is not None:
        raise call.refusal("clips its cells, for which there is no rule")
    named = [name.decode() if isinstance(name, bytes) else name for name in call.attribute("activations", [])]
    defaults = _ACTIVATIONS[kind] * (2 if directions == "bidirectional" else 1)
    if named and [name.lower() for name in named] != [name.lower() for name in defaults]:
        raise call.refusal(f"has the activations {', '.join(named)}; only the default ones have a rule")
    if static(call.x(), layout) is None:
        raise call.refusal("is unrolled for its gradient, but the length of its sequence is not known: fix it")


def _pieces(call: Call, port: int, count: int) -> list[Tensor]:
    """An input's part for each direction, without the direction's axis; none where the input is left out."""
    if not call.has(port):
        return []
    axis = 1 if port > 3 and call.attribute("layout", 0) else 0
    whole = call.x(port)
    parts = call.writer.ops("Split", whole, [1] * count, into=[""] * count, axis=axis) if count > 1 else [whole]
    return [part.op("Squeeze", [axis]) for part in parts]


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0].op("Concat", *parts[1:], axis=axis) if len(parts) > 1 else parts[0]


def _run(
    call: Call, kind: str, x: Tensor, given: Mapping[int, Tensor], length: int, *, backward: bool
) -> tuple[list[Tensor], _State]:
    """Hidden states in order of time, and the final state, of one direction. ``given`` are its inputs by port."""
    gates, width = _GATES[kind], int(call.attribute("hidden_size"))
    late_bias = kind == "GRU" and bool(call.attribute("linear_before_reset", 0))
    inputs = x.op("MatMul", given[1].op("Transpose", perm=[1, 0]))
    recurrent_bias = None
    if 3 in given:
        own, recurrent = call.writer.ops("Split", given[3], [gates * width] * 2, into=["", ""], axis=0)
        recurrent_bias = recurrent if late_bias else None
        inputs = inputs + (own if late_bias else own + recurrent)
    cell = _Cell(call, gates, given[2].op("Transpose", perm=[1, 0]), recurrent_bias)
    steps = call.writer.ops("Split", inputs, [1] * length, into=[""] * length, axis=0) if length > 1 else [inputs]
    batch = dim(call.x(), 0 if call.attribute("layout", 0) else 1)
    shape = batch.op("Concat", [width], axis=0)
    empty = call.writer.zeros(shape, x.elem)
    state: _State = tuple(given.get(port, empty) for port in ((5, 6) if kind == "LSTM" else (5,)))
    hidden = []
    for step in reversed(steps) if backward else steps:
        state = _STEPS[kind](cell, step.op("Squeeze", [0]), state)
        hidden.append(state[0])
    return hidden[::-1] if backward else hidden, state


def _split(cell: _Cell, x: Tensor, count: int) -> list[Tensor]:
    width = int(cell.call.attribute("hidden_size"))
    return x.writer.ops("Split", x, [width] * count, into=[""] * count, axis=1)


def _lstm(cell: _Cell, x: Tensor, state: _State) -> _State:
    hidden, memory = state
    i, o, f, c = _split(cell, x + hidden.op("MatMul", cell.recurrence), 4)
    memory = f.op("Sigmoid") * memory + i.op("Sigmoid") * c.op("Tanh")
    return o.op("Sigmoid") * memory.op("Tanh"), memory


def _gru(cell: _Cell, x: Tensor, state: _State) -> _State:
    (hidden,) = state
    if cell.call.attribute("linear_before_reset", 0):
        own = hidden.op("MatMul", cell.recurrence)
        ours = _split(cell, own if cell.bias is None else own + cell.bias, 3)
        theirs = _split(cell, x, 3)
        z, r = ((a + b).op("Sigmoid") for a, b in zip(theirs[:2], ours[:2], strict=True))
        new = (theirs[2] + r * ours[2]).op("Tanh")
    else:
        width = int(cell.call.attribute("hidden_size"))
        early, late = x.writer.ops("Split", cell.recurrence, [2 * width, width], into=["", ""], axis=1)
        first, last = x.writer.ops("Split", x, [2 * width, width], into=["", ""], axis=1)
        z, r = (gate.op("Sigmoid") for gate in _split(cell, first + hidden.op("MatMul", early), 2))
        new = (last + (r * hidden).op("MatMul", late)).op("Tanh")
    return ((1 - z) * new + z * hidden,)


def _rnn(cell: _Cell, x: Tensor, state: _State) -> _State:
    return ((x + state[0].op("MatMul", cell.recurrence)).op("Tanh"),)


_STEPS: Final[Mapping[str, _Step]] = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
UNROLLED: Final = frozenset(_STEPS)
"""Op types that :func:`unroll` writes out."""
