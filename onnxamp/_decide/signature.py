"""What hazards say of the model's inputs where they need not keep their types."""

from collections.abc import Iterator, Mapping

from onnxamp._decide.hazards.indices import index_paths
from onnxamp._dtypes import FLOAT, Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Origin
from onnxamp._model.statistics import tensor_stats
from onnxamp._ops.facts import op_facts
from onnxamp._options.options import Options


def unfit_defaults(graph: Graph, low: Format) -> Mapping[int, str]:
    """Initializers that callers may override, and whose numbers low precision breaks -> why."""
    indices = graph.ask(index_paths).values
    tensors = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    found: dict[int, str] = {}
    for named in graph.overridable():
        value = named.index
        stats = (
            tensor_stats(tensors[named.name], graph.folder) if graph.types[value] == FLOAT else None
        )
        if stats is None:
            continue
        tiny = abs(stats.uniform or 0.0) if _is_epsilon(graph, value) else 0.0
        if stats.out_of_range(low) is not None:
            found[value] = (
                f"holds {stats.largest_number:.6g}, and {low.name} ends at {low.max_finite:.6g}"
            )
        elif 0 < tiny < low.smallest_normal:
            found[value] = f"is {stats.uniform:.6g}, which {low.name} cannot hold"
        elif value in indices and stats.largest > low.exact_integers:
            found[value] = f"holds {stats.largest:.6g} and {indices[value]}, and {_counts(low)}"
    return found


def _is_epsilon(graph: Graph, value: int) -> bool:
    return any(node.key in op_facts().epsilons for node, _ in graph.consumers(value))


def _counts(low: Format) -> str:
    return f"{low.name} counts only up to {low.exact_integers}"


def signature_warnings(graph: Graph, options: Options) -> Iterator[str]:
    """What to tell of inputs that need not keep their types: which do so all the same, and which lose digits."""
    off, unfit = "keep_io_types (--io-types) is off for it", graph.ask(unfit_defaults, options.low)
    indices = graph.ask(index_paths).values
    for value in graph.scopes[0].inputs:
        named = graph.values[value]
        if graph.types[value] != FLOAT or options.keeps_io(named.name):
            continue
        if value in unfit:
            yield f"The input {named.name!r} stays float32, although {off}: its default {unfit[value]}."
        elif value in indices and named.origin is Origin.INPUT:
            yield (
                f"The input {named.name!r} becomes {options.dtype}, since {off}, but it {indices[value]}, and"
                f" {_counts(options.low)}."
            )
