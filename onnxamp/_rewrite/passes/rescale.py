"""Exponents applied to a model: constants and epsilons are multiplied by powers of two, and the interface by a Mul.

No other number changes: in float32, the model computes the same bits, as long as no value exceeds its range.
"""

from collections.abc import Iterable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxamp._base.words import count
from onnxamp._decide.exponents.equations import Equations, find_equations, is_stored
from onnxamp._decide.exponents.relations import ZERO
from onnxamp._decide.exponents.rows import complete
from onnxamp._facts.ops import attribute
from onnxamp._graph.editor import GraphEditor, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.exponents import store_exponents
from onnxamp._model.protos import copied, copy_fields
from onnxamp._model.sources import scaled_tensor
from onnxamp._model.weights import blocks_of, read_array, times_power
from onnxamp._options.options import Options
from onnxamp._options.values import Level, Rescaling
from onnxamp._rewrite import Draft, PassResult
from onnxamp._rewrite.edits.apply import set_value, stored_value


def apply(draft: Draft, options: Options) -> PassResult:
    """Apply the exponents of the options.

    Raises:
        ArgumentError: the exponents belong to another model.
        ExternalDataError: a constant cannot be read.
    """
    rescaling = options.rescaling
    if rescaling is None or not rescaling.scaled or options.level == Level.O0:
        return PassResult(draft)
    graph = draft.graph
    equations = find_equations(graph)
    exponents = complete(equations, rescaling)
    changes = _Rescaling(graph, equations, exponents)
    changes.constants()
    changes.attributes()
    changes.borders()
    changes.logarithms()
    model = changes.editor.finish()
    store_exponents(model, changes.stored)
    notes = tuple(changes.notes(rescaling))
    return PassResult(Draft(model, graph.folder), notes, requested=True)


class _Rescaling:
    """One rescaling of a copy of the graph's model."""

    def __init__(
        self, graph: Graph, equations: Equations, exponents: Sequence[int]
    ) -> None:
        self.graph = graph
        self.equations = equations
        self.exponents = exponents
        self.editor = GraphEditor(graph)
        self.names = self.editor.names
        self.touched = 0
        self.split = 0
        self.moved = 0
        self.muls = 0
        self.adds = 0
        self.stored = _computed(equations, exponents)
        """Name of a value that nodes compute -> its exponent."""
        self.lost: dict[str, int] = {}
        """Constant -> number of its elements that left float32's range."""

    def constants(self) -> None:
        """Multiply constants, and copy those whose readers want different exponents."""
        readers: dict[int, dict[int, list[tuple[int, int]]]] = {}
        for (node, port), variable in self.equations.uses.items():
            value = self.graph.nodes[node].inputs[port]
            by_exponent = readers.setdefault(value, {})
            if (node, port) not in self.equations.invariant:
                by_exponent.setdefault(self.exponents[variable], []).append(
                    (node, port)
                )
        for value, by_exponent in readers.items():
            returned = bool(self.graph.results[value])
            own = self.exponents[self.equations.values[value]] if returned else None
            # The constant itself takes the smallest exponent, 0 if it can: then it stays as it is.
            first = own
            if first is None:
                first = min(by_exponent, key=abs, default=0)
            for exponent, uses in by_exponent.items():
                if exponent != first:
                    self.copy(value, exponent, uses)
            if first:
                self.replace(value, first)
            self.touched += len([exponent for exponent in by_exponent if exponent])

    def array(self, value: int) -> NDArray[np.float32]:
        """Return the elements of a constant."""
        tensor = self.graph.constants.tensors.get(value)
        if tensor is None:
            node = self.graph.nodes[self.graph.values[value].producer]
            tensor = stored_value(node.proto)
        return read_array(tensor, self.graph.folder)

    def scaled(self, value: int, exponent: int, name: str) -> TensorProto:
        """Return a constant multiplied by ``2**-exponent``; data in a file are multiplied when the file is read."""
        array = self.array(value)
        tensor = self.graph.constants.tensors.get(value)
        if lost := sum(_lost(block, exponent) for block in blocks_of(array)):
            self.lost[self.graph.values[value].name] = lost
        result = None
        if tensor is not None:
            result = scaled_tensor(tensor, self.graph.folder, exponent)
        if result is None:
            return numpy_helper.from_array(times_power(array, exponent), name)
        result.name = name
        return result

    def replace(self, value: int, exponent: int) -> None:
        """Multiply a constant in place."""
        held = self.graph.values[value]
        tensor = self.scaled(value, exponent, "")
        if held.producer == ABSENT:
            _overwrite(self.editor.weight(value), tensor)
        else:
            set_value(self.editor.node(held.producer), tensor)
            self.stored[held.name] = exponent

    def copy(self, value: int, exponent: int, uses: Iterable[tuple[int, int]]) -> None:
        """Add a multiplied copy of a constant for some of its readers."""
        held = self.graph.values[value]
        name = self.names.fresh(f"{held.name}_scaled")
        if held.producer == ABSENT:
            self.editor.add_weight(held.scope, self.scaled(value, exponent, name))
        else:
            second = copied(self.editor.node(held.producer))
            second.name = self.names.fresh(f"{second.name or held.name}_scaled")
            second.output[0] = name
            set_value(second, self.scaled(value, exponent, ""))
            self.editor.insert(held.scope, held.producer, second)
        for node, port in uses:
            self.editor.node(node).input[port] = name
        self.split += 1

    def attributes(self) -> None:
        """Multiply numbers in attributes, such as epsilons, by the powers of two of their terms."""
        for item in self.equations.attributes:
            exponent = sum(
                self.exponents[variable] * number for variable, number in item.terms
            )
            proto = self.editor.node(item.node)
            number = attribute(proto, item.name)
            number = item.default if number is None else number
            if not exponent or not number:
                continue
            result = float(np.ldexp(np.float32(number), -exponent))
            back = np.float32(np.ldexp(np.float32(result), exponent))
            if back != np.float32(number):
                self.lost[f"{self.graph.nodes[item.node].label}.{item.name}"] = 1
            set_attribute(proto, item.name, result)
            self.moved += 1

    def borders(self) -> None:
        """Insert a Mul after inputs and before outputs that have an exponent inside."""
        main = self.graph.scopes[0]
        graph = self.graph
        for value in dict.fromkeys((*main.inputs, *main.outputs)):
            exponent = self.exponents[max(self.equations.value(value), ZERO)]
            if not exponent:
                continue
            is_input = graph.values[value].producer == ABSENT
            name = graph.values[value].name
            inner = self.names.fresh(f"{name}_scaled")
            factor = self.names.fresh(f"{name}_scale")
            for node, port in graph.uses[value]:
                self.editor.node(node).input[port] = inner
            ends = (name, inner) if is_input else (inner, name)
            if not is_input:
                outputs = self.editor.node(graph.values[value].producer).output
                outputs[graph.values[value].port] = inner
            tensor = numpy_helper.from_array(
                np.array(2.0 ** (-exponent if is_input else exponent), np.float32)
            )
            place = main.nodes.start if is_input else main.nodes.stop
            self.editor.insert(
                0,
                place,
                self.editor.make("Constant", [], [factor], value=tensor),
                self.editor.make("Mul", [ends[0], factor], [ends[1]], f"{inner}_by"),
            )
            self.muls += 1

    def logarithms(self) -> None:
        """Insert an Add after each logarithm of a multiplied value: log(2**-n x) = log(x) - n log(2)."""
        for node, variable in self.equations.logarithms.items():
            if not self.exponents[variable]:
                continue
            proto = self.editor.node(node)
            name = proto.output[0]
            inner = self.names.fresh(f"{name}_scaled")
            offset = self.names.fresh(f"{name}_offset")
            proto.output[0] = inner
            tensor = numpy_helper.from_array(
                np.array(self.exponents[variable] * log(2), np.float32)
            )
            self.editor.insert_after(
                node,
                self.editor.make("Constant", [], [offset], value=tensor),
                self.editor.make("Add", [inner, offset], [name], f"{inner}_add"),
            )
            self.adds += 1

    def notes(self, rescaling: Rescaling) -> Iterable[str]:
        """Return sentences about the changes."""
        largest = max(rescaling.scaled, key=lambda row: row.largest or 0.0)
        what = f"{len(rescaling.scaled):,} values are stored as multiples of powers of two"
        if largest.largest:
            now = largest.largest * 2.0**-largest.exponent
            what += f": {largest.value!r} reaches {now:.3g} instead of {largest.largest:.3g}"
        done = [count(self.touched, "constant")]
        if self.moved:
            done.append(count(self.moved, "attribute"))
        text = f"{what}. Multiplied {' and '.join(done)}"
        if self.split:
            text += f", of which {self.split} in a second copy"
        if rescaling.gap:
            text += f"; at most {rescaling.gap:,} fewer may suffice"
        elif rescaling.gap is not None:
            text += "; no exponents need fewer"
        muls = count(self.muls, "Mul")
        yield f"{text}. {muls} at the model's interface." if self.muls else f"{text}."
        if self.adds:
            yield f"{count(self.adds, 'Add')} after logarithms: results differ there by a rounding."
        for name, lost in self.lost.items():
            what = f"{count(lost, 'element')} of {name!r}"
            yield f"{what} left float32's range when multiplied: results differ slightly."


def _computed(equations: Equations, exponents: Sequence[int]) -> dict[str, int]:
    """Return name -> exponent of computed values, except for the model's outputs, which are preceded by a Mul.

    A name for values with different exponents, in branches, is left out.
    """
    graph = equations.graph
    exponent_of = dict[str, int | None]()
    outputs = set(graph.scopes[0].outputs)
    for value, variable in equations.values.items():
        held = graph.values[value]
        exponent = exponents[variable]
        if held.producer == ABSENT or value in outputs or is_stored(graph, value):
            continue
        exponent_of[held.name] = (
            exponent if exponent_of.get(held.name, exponent) == exponent else None
        )
    return {name: exponent for name, exponent in exponent_of.items() if exponent}


def _lost(array: NDArray[np.float32], exponent: int) -> int:
    """Return how many numbers leave float32's range when multiplied by ``2**-exponent``."""
    back = times_power(times_power(array, exponent), -exponent)
    # NaN differs from itself, although nothing of it is lost.
    return int(np.count_nonzero(back != array)) - int(
        np.count_nonzero(np.isnan(array))
    )


def _overwrite(tensor: TensorProto, new: TensorProto) -> None:
    """Replace the elements of an initializer, and nothing else of it."""
    data = ("float_data", "raw_data", "external_data", "data_location")
    for name in data:
        tensor.ClearField(name)
    copy_fields(
        new,
        tensor,
        but=[field.name for field, _ in new.ListFields() if field.name not in data],
    )
