"""Names in options that a model does not have, found before anything takes time."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnxamp._convert.raising import prepared
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.unmatched import Unmatched, unmatched_names
from onnxamp._errors import ArgumentError
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._warnings import warn


def misspelt(model: Model, options: Options) -> list[Unmatched]:
    """Return the names that match nothing, neither in the model as it is nor after folding and inlining.

    Raises:
        As :func:`onnxamp._convert.raising.prepared`.
    """
    found = unmatched_names(model.ask(graph_of), options) if options.has_names else ()
    if not found:
        return []
    inner = {
        (one.option, one.name) for one in unmatched_names(_decided_on(model, options), options)
    }
    return [one for one in found if (one.option, one.name) in inner]


def _decided_on(model: Model, options: Options) -> Graph:
    """The graph whose nodes are decided, as far as it is known before anything is measured."""
    return prepared(model, _measurable(options)).graph


def _measurable(options: Options) -> Options:
    """The options without those that need ranges, which nothing has measured yet."""
    return replace(options, rescale=False, data_max=None) if options.lacks_ranges else options


def refuse_misspelt(model: Model, options: Options) -> None:
    """Check the names in options that are strict about them.

    Raises:
        ArgumentError: a name matches nothing. Others as :func:`misspelt`.
    """
    if options.strict_options:
        refuse(misspelt(model, options))


def refuse(found: Sequence[Unmatched]) -> None:
    """Refuse names that match nothing.

    Raises:
        ArgumentError: there is one.
    """
    if found:
        raise ArgumentError(" ".join(dict.fromkeys(one.text for one in found)))


def everywhere(found: Iterable[Sequence[Unmatched]]) -> tuple[Unmatched, ...]:
    """Return the names that match nothing in any of several models that share their options.

    A text that suggests another name is preferred to one that does not.
    """
    rows = list(found)
    keys = [{(one.option, one.name) for one in row} for row in rows]
    common = set[tuple[str, str]]().union(*keys).intersection(*keys)
    return tuple(
        one for one in _told_once(itertools.chain(*rows)) if (one.option, one.name) in common
    )


def among(found: Iterable[tuple[Options, Sequence[Unmatched]]]) -> tuple[Unmatched, ...]:
    """Return the names that match nothing in any of those models whose options hold them."""
    rows = list(found)
    keys = [(options, {(one.option, one.name) for one in row}) for options, row in rows]

    def matches(one: Unmatched) -> bool:
        """Whether a model has what its options name."""
        holding = (missing for options, missing in keys if _holds(options, one))
        return any((one.option, one.name) not in missing for missing in holding)

    return tuple(
        one for one in _told_once(itertools.chain(*(row for _, row in rows))) if not matches(one)
    )


def _holds(options: Options, one: Unmatched) -> bool:
    """Whether the options hold a name that was found in others."""
    names = getattr(options, one.option)
    return not isinstance(names, bool) and one.name in names


def _told_once(found: Iterable[Unmatched]) -> list[Unmatched]:
    """Each name once, with a text that suggests another one where there is such a text."""
    texts = dict[tuple[str, str], Unmatched]()
    for one in sorted(found, key=lambda one: "?" not in one.text):
        texts.setdefault((one.option, one.name), one)
    return list(texts.values())


def refuse_or_warn(found: Sequence[Unmatched], options: Iterable[Options]) -> None:
    """Refuse names that match nothing where one of the options is strict about them, and warn of them elsewhere.

    Raises:
        ArgumentError: there is such a name.
    """
    if any(one.strict_options for one in options):
        refuse(found)
    warn(dict.fromkeys(one.text for one in found))


def early_warnings(model: Model, options: Options) -> list[str]:
    """Return what a conversion will warn of, as far as that is known before anything is measured.

    Raises:
        ArgumentError: a name matches nothing, and the options are strict about names.
        ContradictionError: two overrides of a node exclude each other. Others as :func:`misspelt`.
    """
    refuse_misspelt(model, options)
    if not options.has_names:
        return []
    return list(find_overrides(_decided_on(model, options), _measurable(options)).warnings)
