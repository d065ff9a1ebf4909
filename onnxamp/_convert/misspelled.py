"""Names in options that a model does not have, found before anything slow runs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnxamp._base.errors import ArgumentError, warn
from onnxamp._convert.raising import start_raised
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.unmatched import Unmatched, unmatched_names
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model
from onnxamp._options.options import Options


def misspelled(model: Model, options: Options) -> list[Unmatched]:
    """Return the names that match nothing, neither in the model as it is nor after folding and inlining.

    Raises:
        As :func:`onnxamp._convert.raising.start_raised`.
    """
    unmatched = (
        unmatched_names(model.ask(graph_of), options) if options.has_names else ()
    )
    if not unmatched:
        return []
    graph, _ = _decided_on(model, options)
    inner = _keys(unmatched_names(graph, options))
    return [one for one in unmatched if (one.option, one.name) in inner]


def _decided_on(model: Model, options: Options) -> tuple[Graph, Options]:
    """Return the graph whose nodes are decided, and the options, as far as both are known before measurements."""
    if options.lacks_ranges:
        options = replace(options, rescale=False, data_max=None)
    return start_raised(model, options).prepared(options).graph, options


def refuse_misspelled(model: Model, options: Options) -> None:
    """Check the names in options that are strict about them.

    Raises:
        ArgumentError: a name matches nothing. Others as :func:`misspelled`.
    """
    if options.strict_options:
        refuse(misspelled(model, options))


def refuse(unmatched: Sequence[Unmatched]) -> None:
    """Refuse names that match nothing.

    Raises:
        ArgumentError: there is one.
    """
    if unmatched:
        texts = dict.fromkeys(one.text for one in unmatched)
        if any(one.is_unaided for one in unmatched):
            texts["onnxamp inspect -v lists the names."] = None
        raise ArgumentError(" ".join(texts))


def everywhere(unmatched: Iterable[Sequence[Unmatched]]) -> tuple[Unmatched, ...]:
    """Return the names that match nothing in any of several models that share their options.

    A text that suggests another name is preferred to one that does not.
    """
    rows = list(unmatched)
    keys = list(map(_keys, rows))
    names = _told_once(itertools.chain(*rows))
    if not keys:
        return ()
    missing = set.intersection(*keys)
    return tuple(name for name in names if (name.option, name.name) in missing)


def among(
    unmatched: Iterable[tuple[Options, Sequence[Unmatched]]],
) -> tuple[Unmatched, ...]:
    """Return the names that match nothing in any of the models whose options contain them."""
    rows = list(unmatched)
    keys = [(options, _keys(row)) for options, row in rows]

    def matches(one: Unmatched) -> bool:
        """Return whether a model has everything that its options name."""
        holding = (missing for options, missing in keys if _holds(options, one))
        return any((one.option, one.name) not in missing for missing in holding)

    names = _told_once(itertools.chain.from_iterable(row for _, row in rows))
    return tuple(name for name in names if not matches(name))


def _keys(names: Iterable[Unmatched]) -> set[tuple[str, str]]:
    """Return names with the options that contain them."""
    return {(name.option, name.name) for name in names}


def _holds(options: Options, one: Unmatched) -> bool:
    """Return whether the options contain a name that was found in other models."""
    names = getattr(options, one.option)
    return not isinstance(names, bool) and one.name in names


def _told_once(unmatched: Iterable[Unmatched]) -> list[Unmatched]:
    """Return each name once, with a suggestion if there is one."""
    # Suggestions end in a question, so they come first and stay.
    texts = dict[tuple[str, str], Unmatched]()
    for one in sorted(unmatched, key=lambda one: "?" not in one.text):
        texts.setdefault((one.option, one.name), one)
    return list(texts.values())


def refuse_or_warn(unmatched: Sequence[Unmatched], options: Iterable[Options]) -> None:
    """Refuse names that match nothing if one of the options is strict about them; otherwise, warn about them.

    Raises:
        ArgumentError: there is such a name.
    """
    if any(one.strict_options for one in options):
        refuse(unmatched)
    warn(dict.fromkeys(one.text for one in unmatched))


def early_warnings(model: Model, options: Options) -> list[str]:
    """Return the warnings of a conversion that are known before anything is measured.

    Raises:
        ArgumentError: a name matches nothing, and the options are strict about names.
        ContradictionError: two overrides of a node exclude each other. Others as :func:`misspelled`.
    """
    refuse_misspelled(model, options)
    if not options.has_names:
        return []
    return list(find_overrides(*_decided_on(model, options)).warnings)
