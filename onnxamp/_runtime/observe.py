"""Making the values of a model visible: functions inlined, and the branches that a sample takes in the main graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import numpy as np
from onnx import ModelProto, helper

from onnxamp._graph.inline import inline_functions
from onnxamp._model.copying import copy_without
from onnxamp._runtime.branches import resolve_branches
from onnxamp._runtime.flow import Flow, flow_of
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.session import Provider
from onnxamp._runtime.shell import WEIGHTS_IN_GRAPH, Shell, take_weights
from onnxamp._runtime.side import run_alone
from onnxamp._runtime.values import Feed


@dataclass(frozen=True, slots=True)
class Observed:
    """A flow, and what it depends on: conditions, and optional inputs that are empty. Where another sample differs in
    them, it needs another flow.
    """

    flow: Flow
    choices: tuple[tuple[str, bool], ...]


def observe(
    model: ModelProto,
    base_dir: str | PathLike[str] | None,
    feeds: Mapping[str, Feed],
    *,
    emulated: bool,
    provider: Provider = "cpu",
    before: Observed | None = None,
    keep: int = WEIGHTS_IN_GRAPH,
) -> Observed:
    """Make a model ready for a sample.

    Args:
        model: it is not changed.
        base_dir: folder of external data, if the model has any that is not loaded.
        feeds: a sample that the model accepts.
        emulated: as for :func:`~onnxamp._runtime.flow.make_flow`.
        provider: where conditions are computed.
        before: what an earlier sample led to; it is returned where the same branches are taken.
        keep: as for :func:`~onnxamp._runtime.flow.make_flow`.

    Raises:
        ModelError, OpsetError, ExternalDataError: as :func:`~onnxamp._runtime.flow.make_flow`.
        RuntimeFailure: a condition cannot be computed.
    """
    if before is not None and not before.choices and not any(feed is None for feed in feeds.values()):
        return before
    shell, taken = settle(model, base_dir, feeds, emulated=emulated, provider=provider, keep=keep)
    if before is not None and before.choices == taken:
        return before
    return Observed(flow_of(shell, emulated=emulated, shapes=_shapes(feeds)), taken)


def _shapes(feeds: Mapping[str, Feed]) -> dict[str, tuple[int, ...]]:
    return {name: feed.shape for name, feed in feeds.items() if isinstance(feed, np.ndarray)}


def settle(
    model: ModelProto,
    base_dir: str | PathLike[str] | None,
    feeds: Mapping[str, Feed],
    *,
    emulated: bool,
    provider: Provider = "cpu",
    keep: int = WEIGHTS_IN_GRAPH,
) -> tuple[Shell, tuple[tuple[str, bool], ...]]:
    """The model that a sample sees: its functions inlined, its branches taken; and the conditions that led to it.

    Arguments and errors as :func:`observe`.
    """
    shell = take_weights(model, base_dir, keep=keep)
    shell = replace(shell, model=_without_empty(inline_functions(shell.model), feeds))
    choices = {name: True for name, feed in feeds.items() if feed is None}
    if any(node.op_type == "If" for node in shell.model.graph.node):

        def decide(written: ModelProto, names: Sequence[str]) -> dict[str, bool]:
            found = _conditions(replace(shell, model=written), names, feeds, provider, emulated=emulated)
            choices.update(found)
            return found

        shell = replace(shell, model=resolve_branches(shell.model, decide))
    return shell, tuple(choices.items())


def _without_empty(model: ModelProto, feeds: Mapping[str, Feed]) -> ModelProto:
    """The model in which optional inputs that the sample leaves empty are made inside: they cannot be fed."""
    empty = [entry for entry in model.graph.input if entry.name in feeds and feeds[entry.name] is None]
    if not empty:
        return model
    result = copy_without(model, "node", "input")
    for entry in empty:
        held = entry.type.optional_type.elem_type
        result.graph.node.append(helper.make_node("Optional", [], [entry.name], type=held))
    result.graph.node.extend(model.graph.node)
    result.graph.input.extend(entry for entry in model.graph.input if entry not in empty)
    return result


def _conditions(
    shell: Shell, names: Sequence[str], feeds: Mapping[str, Feed], provider: Provider, *, emulated: bool
) -> dict[str, bool]:
    """Values of conditions: as much of the model is run as they need."""
    model = ModelProto()
    model.CopyFrom(shell.model)  # the caller edits its own
    flow = flow_of(replace(shell, model=model), emulated=emulated, shapes=_shapes(feeds))
    side = run_alone(Runner(flow, provider), feeds, names)
    return {name: bool(np.asarray(side.output(name)).reshape(-1)[0]) for name in names}
