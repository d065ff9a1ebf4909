"""Models that are low precision already, raised to float32 before anything is decided: ``--from``.

The numbers that a low-precision type holds are float32 numbers, so raising loses nothing; what was rounded away before
does not come back. Inputs and outputs keep their types behind Casts, unless they are to become low precision. Of
sequences and optionals there is no Cast: a warning says that these change.
"""

from collections.abc import Iterator
from dataclasses import replace

from onnxamp._dtypes import FORMATS, element_name, readable_types
from onnxamp._errors import ArgumentError
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.inline import inline_functions
from onnxamp._model.model import Model
from onnxamp._model.storage import weight_bytes
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._rewrite.casts import remove_redundant_casts
from onnxamp._rewrite.prepare import Prepared, prepare
from onnxamp._runtime.emulate import emulate_graph
from onnxamp._warnings import warn


def prepared(model: Model, options: Options) -> Prepared:
    """:func:`onnxamp._rewrite.prepare.prepare` of the model, raised to float32 first if the options say so.

    Raises:
        ArgumentError: the model holds low-precision values of a type other than it is said to come from. Others as
            :func:`onnxamp._rewrite.prepare.prepare`, and, for weights that cannot be read, ExternalDataError.
    """
    source = raised(model, options)
    ready = prepare(source, options)
    if options.from_dtype is None:
        return ready
    if source is model:
        wanted = "low-precision" if options.from_dtype == "auto" else options.from_dtype
        note = f"The model holds no {wanted} values: --from has nothing to raise."
        return replace(ready, notes=(note, *ready.notes))
    warn(_changed(model.ask(graph_of), options))
    held = held_types(model.ask(graph_of))
    note = (
        f"The weights were {' and '.join(held)} before: all was raised to float32 first (--from), which brings back"
        " nothing that was rounded away."
    )
    widened = weight_bytes(source.proto) - model.stock.size
    return replace(ready, notes=(note, *ready.notes), requested=True, widened=widened)


def raised(model: Model, options: Options) -> Model:
    """The model in float32, if the options ask for it and it is not; else the same.

    Raises:
        ArgumentError: the model holds low-precision values of a type other than it is said to come from.
        ExternalDataError: a weight cannot be read.
    """
    held = [] if options.from_dtype is None else held_types(model.ask(graph_of))
    if held and options.from_dtype not in ("auto", *held[: len(held) == 1]):
        raise ArgumentError(
            f"The model holds {' and '.join(held)} values, not {options.from_dtype} alone: --from auto"
            " (from_dtype='auto') raises whatever is low precision."
        )
    return model.ask(_raised, options.keep_io_types) if held else model


def reference_of(model: Model, options: Options) -> Model:
    """What results are compared with: the model, in float32 if it is raised first, since rounding may have broken it.

    Raises:
        As :func:`raised`.
    """
    return raised(model, replace(options, keep_io_types=True))


def held_types(graph: Graph) -> list[str]:
    """The low-precision types of a model's values, by name."""
    kinds = {kind for kind in graph.types if kind is not None}
    return [low.name for low in FORMATS.values() if any(low.tensor in kind for kind in kinds)]


def _changed(graph: Graph, options: Options) -> Iterator[str]:
    """Sentences about inputs and outputs that cannot keep their types."""
    main = graph.scopes[0]
    for value in dict.fromkeys((*main.inputs, *main.outputs)):
        name, kind = graph.values[value].name, graph.types[value] or ""
        is_low = any(low.tensor in kind for low in FORMATS.values())
        if is_low and element_name(kind) == "" and options.keeps_io(name):
            yield (
                f"{name!r} is a {readable_types(kind)}, of which there is no Cast: it becomes float32 although"
                " keep_io_types (--io-types) is to keep it, since from_dtype (--from) raises the model."
            )


def low_note(graph: Graph, options: Options) -> str | None:
    """What is to say of a model that is in another low-precision type than the one asked for; None if it is not."""
    others = [name for name in held_types(graph) if name != options.dtype]
    if not others or options.from_dtype is not None or options.level == Level.O0:
        return None
    return (
        f"What is {others[0]} in the model stays {others[0]}: --from {others[0]} raises it to float32 first, so that it"
        f" can become {options.dtype}."
    )


def _raised(model: Model, keep_io_types: bool | frozenset[str]) -> Model:
    """The model in float32, with all weights inside."""
    graph = Graph.of(inline_functions(model.proto), model.folder)
    listed = [entry.name for entry in (*graph.model.graph.input, *graph.model.graph.output)]
    keeps = (
        keep_io_types
        if isinstance(keep_io_types, frozenset)
        else frozenset(listed if keep_io_types else ())
    )
    return Model(
        remove_redundant_casts(
            emulate_graph(graph, base_dir=model.folder, rounds=False, keeps=keeps)
        )
    )
