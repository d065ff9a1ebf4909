"""Inputs of the model that need not keep their types, but stay in float32 or lose digits."""

from collections.abc import Iterator, Mapping

from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.index_paths import index_paths
from onnxamp._graph.view import Origin
from onnxamp._model.constant_stats import ConstantStats, tensor_stats
from onnxamp._options.options import Options


def unfit_defaults(graph: Graph, low: Format) -> Mapping[int, str]:
    """Return initializers that callers may override and whose numbers low precision breaks -> why."""
    overridable = graph.overridable()
    # Hardly any model has some, and what follows looks at every node and weight.
    if not overridable:
        return {}
    tensors = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    unfit = dict[int, str]()
    for named in overridable:
        if graph.types[named.index] != FLOAT:
            continue
        stats = tensor_stats(tensors[named.name], graph.folder)
        if why := _misfit(graph, low, named.index, stats):
            unfit[named.index] = why
    return unfit


def _misfit(graph: Graph, low: Format, value: int, stats: ConstantStats) -> str:
    """Return why low precision breaks the numbers of a default, in a clause; "" if it does not."""
    readers = {node.key for node, _ in graph.consumers(value)}
    is_epsilon = not op_facts().epsilons.isdisjoint(readers)
    index_uses = graph.ask(index_paths).values
    if stats.out_of_range(low) is not None:
        return f"holds {stats.largest_number:.6g}, and {low.name} ends at {low.max_finite:.6g}"
    if is_epsilon and 0 < abs(stats.uniform or 0.0) < low.smallest_normal:
        return f"is {stats.uniform:.6g}, which {low.name} cannot hold"
    if value in index_uses and stats.largest > low.exact_integers:
        return f"holds {stats.largest:.6g} and {index_uses[value]}, and {_counts(low)}"
    return ""


def _counts(low: Format) -> str:
    """Return a clause about the last exact integer of a format."""
    return f"{low.name} counts only up to {low.exact_integers}"


def signature_warnings(graph: Graph, options: Options) -> Iterator[str]:
    """Yield warnings about inputs that need not keep their types, but stay in float32 or lose digits."""
    off = "keep_io_types (--io-types) is off for it"
    unfit = graph.ask(unfit_defaults, options.low)
    indices = graph.ask(index_paths).values
    for value in graph.scopes[0].inputs:
        named = graph.values[value]
        if graph.types[value] != FLOAT or options.keeps_io(named.name):
            continue
        if value in unfit:
            yield f"The input {named.name!r} stays in float32, although {off}: its default {unfit[value]}."
        elif value in indices and named.origin is Origin.INPUT:
            yield (
                f"The input {named.name!r} becomes {options.dtype}, since {off}, but it {indices[value]}, and"
                f" {_counts(options.low)}."
            )
