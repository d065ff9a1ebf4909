"""Models that are low precision already, raised to float32 before they are converted, if options say so (--from)."""

from collections.abc import Iterator
from dataclasses import replace

from onnxamp._base.errors import ArgumentError, warn
from onnxamp._facts.dtypes import FORMATS, element_name, lows_among, readable_types
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model, weight_bytes
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.passes.casts import remove_redundant_casts
from onnxamp._rewrite.prepare import Start, start


def start_raised(model: Model, options: Options) -> Start:
    """Begin to prepare the model, raised to float32 first if the options say so.

    Raises:
        ArgumentError: the model holds low-precision values of a type other than it is said to come from. Others as
            :func:`onnxamp._rewrite.prepare.start`, and, for weights that cannot be read, ExternalDataError.
    """
    source = raised(model, options)
    begun = start(source, options)
    if options.from_dtype is None:
        return begun
    done = begun.done
    if source is model:
        wanted = (
            "low-precision" if options.from_dtype == "auto" else options.from_dtype
        )
        note = f"The model has no {wanted} values, so --from has no effect."
        return replace(begun, done=replace(done, notes=(note, *done.notes)))
    warn(_changed(model.ask(graph_of), options))
    held = held_types(model.ask(graph_of))
    note = (
        f"The weights were {' and '.join(held)} before: everything was raised to float32 first (--from), which does not"
        " restore the digits that were rounded away."
    )
    widened = weight_bytes(source.proto) - model.stock.size
    return Start(replace(done, notes=(note, *done.notes), requested=True), widened)


def raised(model: Model, options: Options) -> Model:
    """Return the model in float32, if the options ask for it and it is not; else the same.

    Raises:
        ArgumentError: the model holds low-precision values of a type other than it is said to come from.
        ExternalDataError: a weight cannot be read.
    """
    held = [] if options.from_dtype is None else held_types(model.ask(graph_of))
    if held and options.from_dtype != "auto" and held != [options.from_dtype]:
        raise ArgumentError(
            f"The model holds {' and '.join(held)} values, not {options.from_dtype} alone: --from auto"
            " (from_dtype='auto') raises all low-precision values."
        )
    # Conversions and checks ask for the same raised model, which is cached with the original.
    return model.ask(_raised, options.keep_io_types) if held else model


def reference_of(model: Model, options: Options) -> Model:
    """Return the reference of results: the model, raised to float32 first if requested, because rounding may have
    broken it.

    Raises:
        As :func:`raised`.
    """
    return raised(model, replace(options, keep_io_types=True))


def held_types(graph: Graph) -> list[str]:
    """Return the low-precision types of a model's values, by name."""
    return [low.name for low in lows_among(graph.types)]


def _changed(graph: Graph, options: Options) -> Iterator[str]:
    """Yield sentences about inputs and outputs that cannot keep their types."""
    main = graph.scopes[0]
    for value in dict.fromkeys((*main.inputs, *main.outputs)):
        name = graph.values[value].name
        kind = graph.types[value] or ""
        is_low = any(low.tensor in kind for low in FORMATS.values())
        if is_low and element_name(kind) == "" and options.keeps_io(name):
            yield (
                f"{name!r} is a {readable_types(kind)}, which no Cast converts, so it becomes float32 although"
                " keep_io_types (--io-types) asks to keep its type: from_dtype (--from) raises the whole model."
            )


def low_note(graph: Graph, options: Options) -> str | None:
    """Return a note about a model in another low-precision type than the requested one; None for other models."""
    others = [name for name in held_types(graph) if name != options.dtype]
    if not others or options.from_dtype is not None or options.level == Level.O0:
        return None
    return (
        f"The {others[0]} values of the model stay in {others[0]}: --from {others[0]} raises them to float32 first, so that"
        f" they can become {options.dtype}."
    )


def _raised(model: Model, keep_io_types: bool | frozenset[str]) -> Model:
    """Return the model in float32, with all weights inside."""
    graph = Graph.of(inline_functions(model.proto), model.folder)
    from onnxamp._runtime.emulate import emulate_graph  # noqa: PLC0415 - few models are low already

    if isinstance(keep_io_types, bool):
        listed = (*graph.model.graph.input, *graph.model.graph.output)
        names = (entry.name for entry in listed)
        keep_io_types = frozenset(names if keep_io_types else ())
    proto = emulate_graph(
        graph, base_dir=model.folder, rounds=False, keeps=keep_io_types
    )
    return Model(remove_redundant_casts(proto))
