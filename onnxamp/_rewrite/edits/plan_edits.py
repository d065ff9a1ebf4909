"""The edits that carry out a decision, in three steps: names, Casts, removals.

Each step is a function from values to a value. :func:`onnxamp._rewrite.edits.value_names.find_names` names every
value in the precisions in which it is read, :func:`onnxamp._rewrite.edits.new_casts.find_casts` makes the second
versions of those that are read in both, and :func:`onnxamp._rewrite.edits.removals.find_removals` lists what nothing
reads any more. The rest is here, because it follows from these: names of inputs and results, types, weights and
attributes.

Complexity: linear in ports.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from onnxamp._decide.kinds import kinds
from onnxamp._decide.precision import Decision
from onnxamp._decide.problem import Problem
from onnxamp._decide.variables.ports import LOW, NONE
from onnxamp._facts.dtypes import retyped
from onnxamp._facts.ops import op_facts
from onnxamp._graph.editor import NewNames
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.blobs import Chosen
from onnxamp._model.weights import Scratch, lower
from onnxamp._rewrite.edits.apply import Edits, NewConstant
from onnxamp._rewrite.edits.new_casts import find_casts
from onnxamp._rewrite.edits.removals import find_removals
from onnxamp._rewrite.edits.value_names import Names, find_names, low_source


def plan_edits(problem: Problem, decision: Decision) -> Edits:
    """Plan the edits that carry out a decision."""
    new = NewNames(problem.graph.all_names())
    # The steps take new names one after another, so their order determines the names in the result.
    names = find_names(problem, decision, new)
    casts, copies, dequantized = find_casts(problem, decision, names, new)
    inputs = _inputs(problem, decision, names)
    results = _results(problem, decision, names)
    weights = _weights(problem, names)
    unbounded, bounded = _bounded_sums(problem, decision, names, new)
    return Edits(
        problem.options.low,
        casts=casts,
        copies=copies,
        dequantized=dequantized,
        moved=names.moved,
        removed=find_removals(problem, names, inputs, results),
        inputs=inputs,
        outputs={**names.outputs, **unbounded},
        results=results,
        types=_types(problem, names.low_names),
        result_types=_result_types(problem, decision),
        attributes=_attributes(problem, names),
        weights=weights,
        renamed=names.renamed,
        rounded=_kept_positive(problem, weights, copies),
        halved=_halved(problem, decision),
        sums=bounded,
    )


# -- ports -----------------------------------------------------------------------------------------------------------


def _inputs(
    problem: Problem, decision: Decision, names: Names
) -> dict[tuple[int, int], str]:
    """Return (node, input) -> the name of the version that it reads, where that is not the value's own."""
    ports, values = problem.ports, problem.graph.values
    inputs = dict[tuple[int, int], str]()
    low_of = decision.of_ports()
    # Nearly all nodes read values that have no name but their own.
    changed = {*names.aliases}
    for value, versions in names.of.items():
        own = values[value].name
        for name in versions.values():
            if name != own:
                changed.add(value)
    for node in problem.graph.nodes:
        if changed.isdisjoint(node.inputs):
            continue
        consumed = ports.consumed[node.index]
        for port, value in enumerate(node.inputs):
            variable = consumed[port]
            is_alias = value in names.aliases
            if value == ABSENT or (variable == NONE and not is_alias):
                continue
            is_low = low_of[variable]
            if variable == LOW and node.key == "Cast":
                # An original Cast reads what the producer delivers.
                is_made_low = decision.is_low(ports.produced[value])
                is_low = value not in ports.raised_from and is_made_low
            source = low_source(problem, decision, names, value) if is_alias else None
            read = source.name if source else names.of[value].get(is_low)
            if read is not None and read != values[value].name:
                inputs[node.index, port] = read
    return inputs


def _results(
    problem: Problem, decision: Decision, names: Names
) -> dict[tuple[int, int], str]:
    """Return (scope, output) -> the name of the version that it returns, where that is a new one."""
    returned = problem.ports.returned
    results = dict[tuple[int, int], str]()
    for scope in problem.graph.scopes:
        for position, value in enumerate(scope.outputs):
            key = (scope.index, position)
            if value in names.aliases:
                source = low_source(problem, decision, names, value)
                results[key] = source.name
            if key not in returned:
                continue
            name = names.of[value].get(decision.is_low(returned[key]))
            if name is not None and name != scope.proto.output[position].name:
                results[key] = name
    return results


def _result_types(problem: Problem, decision: Decision) -> dict[tuple[int, int], str]:
    """Return (scope, output) -> the low-precision type that it gets."""
    types = dict[tuple[int, int], str]()
    for (scope, position), variable in problem.ports.returned.items():
        if decision.is_low(variable):
            kind = problem.graph.types[problem.graph.scopes[scope].outputs[position]]
            assert kind is not None
            types[scope, position] = retyped(kind, problem.options.low)
    return types


# -- types and stored numbers ----------------------------------------------------------------------------------------


def _types(problem: Problem, values: AbstractSet[int]) -> dict[int, str]:
    """Return the low-precision types of values."""
    kinds = problem.graph.types
    known = {kind: retyped(kind or "", problem.options.low) for kind in set(kinds)}
    return {value: known[kinds[value]] for value in values}


def _weights(problem: Problem, names: Names) -> frozenset[int]:
    """Return the initializers that become low precision in place."""
    values = problem.graph.values
    return frozenset(value for value in names.low_stores if values[value].is_stored)


def _attributes(problem: Problem, names: Names) -> frozenset[int]:
    """Return the nodes with an attribute that determines the type of a value, which becomes low precision."""
    graph = problem.graph
    recast = {graph.values[value].producer for value in names.low_casts}
    able = (*op_facts().dtype_attribute, "Constant", "Optional")
    makers = {
        node.index
        for node in graph.nodes_of(able)
        if node.output(0) in names.low_stores and _sets_type(node)
    }
    return frozenset(makers | recast)


def _sets_type(node: Node) -> bool:
    """Return whether an attribute of a node determines the type of its first output."""
    if node.key == "Constant" or (node.key == "Optional" and not node.inputs):
        return True
    rule = op_facts().dtype_attribute.get(node.key)
    if rule is None:
        return False
    is_given = any(item.name == rule.attribute for item in node.proto.attribute)
    return is_given or rule.default not in ("input", "scale")


def _halved(problem: Problem, decision: Decision) -> frozenset[int]:
    """Return constants with sentinels on low mask paths: half the range keeps mask + score finite."""
    graph, constants = problem.graph, problem.graph.constants
    halved = set[int]()
    for index in set(chain.from_iterable(problem.sentinels)):
        variables = problem.ports.consumed[index]
        for value, variable in zip(graph.nodes[index].inputs, variables, strict=True):
            stats = constants.stats(value) if decision.is_low(variable) else None
            if stats is not None and stats.has_sentinel(problem.options.low):
                halved.add(constants.source(value))
    return frozenset(halved)


def _kept_positive(
    problem: Problem, weights: AbstractSet[int], copies: Sequence[NewConstant]
) -> dict[int, Chosen]:
    """Return the numbers of low weights that must not become 0: the smallest number replaces zeros of rounding."""
    low = problem.options.low
    stored = weights | {copy.value for copy in copies}
    held = (kind.low_numbers(problem.graph, low) for kind in kinds())
    kept = dict[int, Chosen]()
    for value, numbers in chain.from_iterable(held):
        if value in stored:
            flat = numbers.reshape(-1)
            bits, counts = lower(flat, low, low.max_finite, Scratch(flat.size))
            # The bits of the smallest positive number of a float format are those of the integer 1.
            bits[(bits == 0) & (flat != 0)] = 1
            kept[value] = Chosen(bits, counts)
    return kept


def _bounded_sums(
    problem: Problem, decision: Decision, names: Names, new: NewNames
) -> tuple[dict[tuple[int, int], str], dict[int, tuple[str, str]]]:
    """Bound low sums of scores and a mask among the inputs.

    Return the new names of the outputs of their nodes, and by node the names of the bounded result and of a value on
    the way there.

    Where a type is narrow, a score beside its largest number overflows, or leaves traces, by which a fully masked
    row would not be uniform.
    """
    graph = problem.graph
    outputs = dict[tuple[int, int], str]()
    results = dict[int, tuple[str, str]]()
    sums: Sequence[int] = ()
    if problem.options.low.is_narrow:
        sums = [node.index for node in graph.at(problem.masks.sums)]
    for index in sums:
        value = graph.nodes[index].outputs[0]
        variable = problem.ports.produced[value]
        is_low = variable >= 0 and decision.is_low(variable)
        if is_low and names.of[value].get(True):
            name = names.outputs.get((index, 0), graph.values[value].name)
            outputs[index, 0] = new.fresh(f"{name}_unbounded")
            results[index] = name, new.fresh(f"{name}_floored")
    return outputs, results
