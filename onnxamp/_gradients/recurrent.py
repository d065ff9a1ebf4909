"""LSTM, GRU and RNN over sequences of known length, unrolled into ops that have gradient rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from onnxamp._gradients.writer import Call, Tensor

_GATES: Final = {"GRU": 3, "LSTM": 4, "RNN": 1}
"""Blocks of a weight along its first axis, by op; schemas of ONNX give their order."""
_ACTIVATIONS: Final = {
    "GRU": ["sigmoid", "tanh"],
    "LSTM": ["sigmoid", "tanh", "tanh"],
    "RNN": ["tanh"],
}
"""Default activations of one direction, from the schemas."""
_State = tuple[Tensor, ...]
"""Hidden state and, for an LSTM, cell state; [batch, hidden] each."""
_Step = Callable[[Call, Tensor, Tensor | None, Tensor, _State], _State]
"""Computes the next state of a node from the input's projection and the last state.

Its other arguments are the recurrence [hidden, gates * hidden] and the bias [gates * hidden] of a GRU with
linear_before_reset (other biases are part of the projection).
"""


def unroll(call: Call) -> None:
    """Replace the node with its steps.

    Raises:
        GradientError: the sequence length is unknown, or the activations are not the default ones.
    """
    layout = call.attribute("layout")
    count = _directions(call)
    length = checked_length(call)
    x = call.x.transpose([1, 0, 2]) if layout else call.x
    pieces = {port: _pieces(call, port, count) for port in (1, 2, 3, 5, 6)}
    rows: list[Tensor] = []
    finals: list[_State] = []
    for index in range(count):
        backward = call.attribute("direction") == "reverse" or index == 1
        given = {port: parts[index] for port, parts in pieces.items() if parts}
        steps, final = _run(call, x, given, length, backward=backward)
        rows.append(_stacked(steps).op("Unsqueeze", [1]))
        finals.append(final)
    states = map(_stacked, zip(*finals, strict=True))
    outputs = [call.writer.concat(rows, 1), *states]
    for port, (output, wanted) in enumerate(zip(outputs, call.outputs, strict=False)):
        if wanted is None:
            continue
        if layout:
            perm = [2, 0, 1, 3] if port == 0 else [1, 0, 2]
            output.op("Transpose", into=wanted.name, perm=perm)
        else:
            output.op("Identity", into=wanted.name)


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors joined along a new first axis."""
    return tensors[0].writer.concat(
        [tensor.op("Unsqueeze", [0]) for tensor in tensors], 0
    )


def _directions(call: Call) -> int:
    """Return the number of directions in which the node reads the sequences."""
    return 2 if call.attribute("direction") == "bidirectional" else 1


def checked_length(call: Call) -> int:
    """Return the length of the sequences if the node can be unrolled.

    Raises:
        GradientError: it is unknown, or the activations are not the default ones.
    """
    named = [name.decode() for name in call.attribute("activations") or ()]
    usual = _ACTIVATIONS[call.node.key] * _directions(call)
    if named and [name.lower() for name in named[: len(usual)]] != usual:
        raise call.error(
            f"has the activations {', '.join(named)}; only the default ones have a gradient rule"
        )
    length = call.x.known_size(call.attribute("layout"))
    if length is None:
        raise call.error(
            "must be unrolled for its gradient, but its sequence length is unknown: give the input a fixed length"
        )
    return length


def _pieces(call: Call, port: int, count: int) -> list[Tensor]:
    """Return the part of an input for each direction, without the direction axis; none if the input is absent."""
    if not call.has(port):
        return []
    axis = 1 if port > 3 and call.attribute("layout") else 0
    parts = call[port].split([1] * count, axis)
    return [part.op("Squeeze", [axis]) for part in parts]


def _run(
    call: Call, x: Tensor, given: Mapping[int, Tensor], length: int, *, backward: bool
) -> tuple[list[Tensor], _State]:
    """Return the hidden states by time and the final state of one direction; ``given`` has its inputs by port."""
    kind = call.node.key
    width = call.attribute("hidden_size")
    # One product for all steps, since the input's part does not depend on the state.
    inputs = x.op("MatMul", given[1].transpose([1, 0]))
    late_bias = None
    if 3 in given:
        own, recurrent = given[3].split([_GATES[kind] * width] * 2, 0)
        if kind == "GRU" and call.attribute("linear_before_reset"):
            late_bias = recurrent  # the reset gate multiplies it as well
        else:
            own = own + recurrent
        inputs = inputs + own
    recurrence = given[2].transpose([1, 0])
    steps = inputs.split([1] * length, 0)
    batch = call.x.size(0 if call.attribute("layout") else 1)
    empty = call.writer.vector(batch, width).zeros(x.elem)
    ports = (5, 6) if kind == "LSTM" else (5,)
    state: _State = tuple(given.get(port, empty) for port in ports)
    hidden = []
    for step in reversed(steps) if backward else steps:
        x = step.op("Squeeze", [0])
        state = _STEPS[kind](call, recurrence, late_bias, x, state)
        hidden.append(state[0])
    # Results are in the order of the sequence, whatever the direction.
    return hidden[::-1] if backward else hidden, state


def _split(call: Call, x: Tensor, count: int) -> list[Tensor]:
    """Return the parts of a projection, one for each gate."""
    return x.split([call.attribute("hidden_size")] * count, 1)


def _lstm(
    call: Call, recurrence: Tensor, _bias: Tensor | None, x: Tensor, state: _State
) -> _State:
    hidden, memory = state
    i, o, f, c = _split(call, x + hidden.op("MatMul", recurrence), 4)
    memory = f.op("Sigmoid") * memory + i.op("Sigmoid") * c.op("Tanh")
    return o.op("Sigmoid") * memory.op("Tanh"), memory


def _gru(
    call: Call, recurrence: Tensor, bias: Tensor | None, x: Tensor, state: _State
) -> _State:
    (hidden,) = state
    if call.attribute("linear_before_reset"):
        own = hidden.op("MatMul", recurrence)
        z_state, r_state, new_state = _split(
            call, own if bias is None else own + bias, 3
        )
        z_input, r_input, new_input = _split(call, x, 3)
        z = (z_input + z_state).op("Sigmoid")
        r = (r_input + r_state).op("Sigmoid")
        new = (new_input + r * new_state).op("Tanh")
    else:
        width = call.attribute("hidden_size")
        early, late = recurrence.split([2 * width, width], 1)
        first, last = x.split([2 * width, width], 1)
        gates = _split(call, first + hidden.op("MatMul", early), 2)
        z, r = (gate.op("Sigmoid") for gate in gates)
        new = (last + (r * hidden).op("MatMul", late)).op("Tanh")
    return ((1 - z) * new + z * hidden,)


def _rnn(
    _: Call, recurrence: Tensor, _bias: Tensor | None, x: Tensor, state: _State
) -> _State:
    return ((x + state[0].op("MatMul", recurrence)).op("Tanh"),)


_STEPS: Final[Mapping[str, _Step]] = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
UNROLLED: Final = frozenset(_STEPS)
"""Op types that :func:`unroll` handles."""
