"""What the functions of other converters have in common: everything becomes low precision but what is blocked."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from onnx import ModelProto, numpy_helper

from onnxamp._amp import named_hazards
from onnxamp._convert.convert import Converted
from onnxamp._convert.plan import make_plan
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._job.pipeline import convert_in_memory
from onnxamp._job.request import Request
from onnxamp._model.copying import copied
from onnxamp._model.model import Model
from onnxamp._model.storage import load_external_data
from onnxamp._model.weights import read_array
from onnxamp._options.checks import checked_names
from onnxamp._options.levels import Level
from onnxamp._options.lists import Preset
from onnxamp._options.options import Options
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.samples import SamplesLike
from onnxamp._runtime.session import Provider
from onnxamp._warnings import HazardWarning, warn
from onnxamp.compat._numbers import Range

_NO_LISTS: Final = Preset("none", "", {}, {}, folds_batch_norm=False)


def convert_all_but(
    model: Model,
    op_types: Iterable[str],
    *,
    known: Iterable[str] = (),
    within: Range | None = None,
    samples: SamplesLike | None = None,
    provider: Provider | None = None,
    **options: Any,
) -> ModelProto:
    """Lower every op of a model that is not blocked, whatever its Casts cost, and warn of hazards.

    Args:
        model: the model; it is not changed.
        op_types: op types to keep in float32, in any domain.
        known: names among them that are not warned of if the model has no such op.
        within: the range that weights are limited to where they become low precision.
        samples: the inputs for ``data_max``.
        provider: where the model runs for ``data_max``.
        options: further options of the conversion.

    Raises:
        As :func:`onnxamp.convert_model`.
    """
    black = _keys(model.ask(graph_of), op_types, known)
    keywords = {"strict": True, "lists": _NO_LISTS, "black_list": black, "fold": False}
    settings = Options.of(Level.O2, keywords | options)
    request = Request(model=model, asked=settings, run=RunOptions(samples=samples, provider=provider))
    converted, _ = convert_in_memory(request)
    plan = make_plan(converted.analysis)
    warn(named_hazards(plan.hazards, settings), HazardWarning)
    limited = None if within is None else _limited(converted, within)
    if limited is not None:
        again = replace(request, model=Model(limited), plan=plan, warn=lambda _: None)  # they were given
        converted, _ = convert_in_memory(again)
    return converted.embedded()


def _keys(graph: Graph, op_types: Iterable[str], known: Iterable[str]) -> list[str]:
    """Op types with the domains in which the model has them; those that it lacks and that are not ``known`` as well."""
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        found.setdefault(node.proto.op_type, {})[node.key] = None
    expected = frozenset(known)
    names = checked_names("A list of op types", op_types)
    return [key for name in names for key in found.get(name, () if name in expected else (name,))]


def _limited(converted: Converted, within: Range) -> ModelProto | None:
    """The prepared model with all weights that become low precision limited to a range; None if they all are.

    Limiting before converting rounds once, and a plan keeps the decisions as they were.
    """
    graph, edits = converted.analysis.graph, converted.analysis.edits
    low = {*edits.weights, *(copy.value for copy in edits.copies)}
    low.update(value for node in edits.attributes for value in graph.nodes[node].outputs)
    tensors: Mapping[int, Any] = graph.constants.tensors
    beyond = [value for value in low & tensors.keys() if within.changes(read_array(tensors[value], graph.folder))]
    if not beyond:
        return None
    result = copied(graph.model)
    if graph.folder is not None:
        load_external_data(result, graph.folder)
    mine = constant_tensors(Graph.of(result))
    for value in beyond:
        tensor = mine[value]
        tensor.CopyFrom(numpy_helper.from_array(within.limited(numpy_helper.to_array(tensor)), tensor.name))
    return result
