"""LSTM, GRU and RNN over sequences of known length, unrolled into ops that have gradient rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from onnxamp.train._gradients.calls import Call
from onnxamp.train._gradients.writer import Tensor

_GATES: Final = {"GRU": 3, "LSTM": 4, "RNN": 1}
_ACTIVATIONS: Final = {
    "GRU": ["Sigmoid", "Tanh"],
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
    "RNN": ["Tanh"],
}
"""Default activations of one direction, as the schemas say."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """The weights of one direction."""

    call: Call
    recurrence: Tensor
    """[hidden, gates * hidden]."""
    bias: Tensor | None
    """[gates * hidden] for a GRU with linear_before_reset; otherwise all biases are added to the input projection."""


_State = tuple[Tensor, ...]
"""Hidden state and, for an LSTM, cell state; [batch, hidden] each."""
_Step = Callable[[_Cell, Tensor, _State], _State]


def unroll(call: Call) -> None:
    """Write the steps of the node in place of the node.

    Raises:
        GradientError: the sequence length is unknown, or the node uses an option without a rule: sequence lengths,
            peepholes, clipping, non-default activations.
    """
    kind, layout = call.proto.op_type, int(call.attribute("layout", 0))
    _check(call)
    x = call.x.transpose([1, 0, 2]) if layout else call.x
    length = call.x.known_size(layout)
    assert length is not None
    directions = str(call.attribute("direction", "forward"))
    count = 2 if directions == "bidirectional" else 1
    pieces = {port: _pieces(call, port, count) for port in (1, 2, 3, 5, 6)}
    rows: list[Tensor] = []
    finals: list[_State] = []
    for index in range(count):
        backward = directions == "reverse" or index == 1
        given = {port: parts[index] for port, parts in pieces.items() if parts}
        steps, final = _run(call, kind, x, given, length, backward=backward)
        rows.append(
            call.writer.concat([step.op("Unsqueeze", [0]) for step in steps], 0).op(
                "Unsqueeze", [1]
            )
        )
        finals.append(final)
    outputs = [call.writer.concat(rows, 1)]
    outputs += [
        call.writer.concat([state.op("Unsqueeze", [0]) for state in states], 0)
        for states in zip(*finals, strict=True)
    ]
    for port, (made, wanted) in enumerate(zip(outputs, call.outputs, strict=False)):
        if wanted is not None:
            perm = ([2, 0, 1, 3] if port == 0 else [1, 0, 2]) if layout else None
            made.op("Transpose" if layout else "Identity", into=wanted.name, perm=perm)


def _check(call: Call) -> None:
    kind = call.proto.op_type
    layout, directions = (
        int(call.attribute("layout", 0)),
        str(call.attribute("direction", "forward")),
    )
    if call.has(4):
        raise call.error(
            "takes sequence lengths; only sequences of one length have a gradient rule"
        )
    if call.has(7) or call.attribute("input_forget", 0):
        raise call.error("has peepholes or coupled gates, for which there is no gradient rule")
    if call.attribute("clip") is not None:
        raise call.error("clips its cell state, for which there is no gradient rule")
    named = [
        name.decode() if isinstance(name, bytes) else name
        for name in call.attribute("activations", [])
    ]
    defaults = _ACTIVATIONS[kind] * (2 if directions == "bidirectional" else 1)
    if named and [name.lower() for name in named] != [name.lower() for name in defaults]:
        raise call.error(
            f"has the activations {', '.join(named)}; only the default ones have a gradient rule"
        )
    if call.x.known_size(layout) is None:
        raise call.error(
            "must be unrolled for its gradient, but its sequence length is unknown: give the input a fixed length"
        )


def _pieces(call: Call, port: int, count: int) -> list[Tensor]:
    """The part of an input for each direction, without the direction axis; none where the input is absent."""
    if not call.has(port):
        return []
    axis = 1 if port > 3 and call.attribute("layout", 0) else 0
    whole = call[port]
    parts = (
        call.writer.ops("Split", whole, [1] * count, into=[""] * count, axis=axis)
        if count > 1
        else [whole]
    )
    return [part.op("Squeeze", [axis]) for part in parts]


def _run(
    call: Call, kind: str, x: Tensor, given: Mapping[int, Tensor], length: int, *, backward: bool
) -> tuple[list[Tensor], _State]:
    """Hidden states by time, and the final state, of one direction; ``given`` has its inputs by port."""
    width = int(call.attribute("hidden_size"))
    late_bias = kind == "GRU" and bool(call.attribute("linear_before_reset", 0))
    inputs = x.op("MatMul", given[1].transpose([1, 0]))
    recurrent_bias = None
    if 3 in given:
        own, recurrent = call.writer.ops(
            "Split", given[3], [_GATES[kind] * width] * 2, into=["", ""], axis=0
        )
        recurrent_bias = recurrent if late_bias else None
        inputs = inputs + (own if late_bias else own + recurrent)
    cell = _Cell(call, given[2].transpose([1, 0]), recurrent_bias)
    steps = (
        call.writer.ops("Split", inputs, [1] * length, into=[""] * length, axis=0)
        if length > 1
        else [inputs]
    )
    batch = call.x.size(0 if call.attribute("layout", 0) else 1)
    empty = call.writer.zeros(call.writer.vector(batch, width), x.elem)
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
        early, late = x.writer.ops(
            "Split", cell.recurrence, [2 * width, width], into=["", ""], axis=1
        )
        first, last = x.writer.ops("Split", x, [2 * width, width], into=["", ""], axis=1)
        z, r = (gate.op("Sigmoid") for gate in _split(cell, first + hidden.op("MatMul", early), 2))
        new = (last + (r * hidden).op("MatMul", late)).op("Tanh")
    return ((1 - z) * new + z * hidden,)


def _rnn(cell: _Cell, x: Tensor, state: _State) -> _State:
    return ((x + state[0].op("MatMul", cell.recurrence)).op("Tanh"),)


_STEPS: Final[Mapping[str, _Step]] = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
UNROLLED: Final = frozenset(_STEPS)
"""Op types that :func:`unroll` handles."""
