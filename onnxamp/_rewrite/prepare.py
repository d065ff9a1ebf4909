"""Preparation of a model for analysis: the passes that rewrite it before anything is decided."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from onnxamp._base.errors import ArgumentError
from onnxamp._base.records import record
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._rewrite import Draft, Pass, PassResult
from onnxamp._rewrite.passes import (
    casts,
    compute,
    fold,
    freeze,
    inline,
    mend,
    named,
    requantize,
    rescale,
    split_k,
    upgrade,
)
from onnxamp._rewrite.passes.fold_search import Fold

PASSES: Final = (
    inline.apply,
    mend.apply,
    named.apply,
    upgrade.apply,
    freeze.apply,
    compute.apply,
    fold.apply,
    requantize.apply,
    rescale.apply,
    split_k.apply,
    casts.apply,
)
"""All passes, in their order.

Functions go first, because passes rewrite no nodes in them. Weights are frozen before constants are computed and
folded, because a weight that callers can override is no constant.
"""

_BEFORE_FOLDS: Final = PASSES[: PASSES.index(fold.apply)]
_AFTER_FOLDS: Final = PASSES[len(_BEFORE_FOLDS) + 1 :]

_HIDE_FAULTS: Final = (mend.apply, compute.apply, casts.apply)
"""Passes that remove what checks report."""

_BEFORE_CHECKS: Final = tuple(one for one in PASSES if one not in _HIDE_FAULTS)


@record
class Prepared:
    """The graph to analyze.

    Attributes:
        graph: the graph of the prepared model.
        notes: one sentence per change.
        requested: whether there is a change that stays even if nothing is lowered: an upgrade or a folding that the
            user requested, or removed Casts.
        pairs: number of redundant pairs of Casts that were removed.
        casts: number of all Casts that went: those of pairs, idle ones and duplicates.
        widened: bytes that its weights take more than those of the model.
        refused: sentences about upgrades to newer opsets that were not taken, with reasons.
        unfolded: sentences about requested folds that were not made, with reasons.
    """

    graph: Graph
    notes: tuple[str, ...]
    requested: bool
    pairs: int = 0
    casts: int = 0
    widened: int = 0
    refused: tuple[str, ...] = ()
    unfolded: tuple[str, ...] = ()


@record
class Start:
    """A model before its patterns are folded: the same whatever is folded.

    Attributes:
        done: what the passes up to there did.
        widened: see :class:`Prepared`.
    """

    done: PassResult
    widened: int = 0

    @property
    def graph(self) -> Graph:
        """The graph in which patterns are found."""
        return self.done.graph

    def prepared(
        self, options: Options, folds: Sequence[Fold] | None = None
    ) -> Prepared:
        """Return the model with patterns folded, and ready for analysis.

        Args:
            options: the options of the conversion, which name the patterns to fold.
            folds: the folds that they name, if these are found already.
        """
        done = fold.apply(self.done.draft, options, folds).after(self.done)
        ready = _ready(_passed(done, options, _AFTER_FOLDS))
        return replace(ready, widened=self.widened)


def start(model: Model, options: Options) -> Start:
    """Begin to prepare a copy of a model.

    Raises:
        OpsetError: the model cannot be upgraded to the requested opset.
        ModelError: the model is invalid.
        ArgumentError: exponents or ``data_max`` are requested, but no ranges were measured, or those of another model.
    """
    if options.lacks_ranges:
        raise ArgumentError(
            f"{'rescale' if options.data_max is None else 'data_max'} needs the ranges of values on inputs, which"
            " 'onnxamp convert' and 'onnxamp tune' measure (convert_model, convert_file, plan_model and tune_model)."
        )
    return Start(_passed(_given(model), options, _BEFORE_FOLDS))


def prepare(model: Model, options: Options) -> Prepared:
    """Prepare a copy of a model; a model that needs no preparation is analyzed as it is.

    Raises:
        As :func:`start`.
    """
    return start(model, options).prepared(options)


def with_casts(model: Model, options: Options) -> Prepared:
    """As :func:`prepare`, without removing Casts or faults, and without checking that ranges were measured."""
    return _ready(_passed(_given(model), options, _BEFORE_CHECKS))


def _given(model: Model) -> PassResult:
    """Return the model as it comes to the first pass."""
    draft = Draft(model.proto, model.folder, lambda: model.ask(graph_of))
    return PassResult(draft, notes=model.repairs)


def _passed(done: PassResult, options: Options, passes: Iterable[Pass]) -> PassResult:
    """Return the result of these passes, one after another."""
    for apply in passes:
        done = apply(done.draft, options).after(done)
    return done


def _ready(done: PassResult) -> Prepared:
    """Return the model that all passes have prepared."""
    return Prepared(
        graph=done.graph,
        notes=done.notes,
        requested=done.requested,
        pairs=done.pairs,
        casts=done.casts,
        unfolded=done.refused,
    )
