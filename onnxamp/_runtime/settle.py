"""Settling what a model computes of a sample, so that its values can be observed: functions inlined, branches taken."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike

import numpy as np
from onnx import ModelProto, helper

from onnxamp._graph.inline import inline_functions
from onnxamp._model.protos import copied, copy_without
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.branches import resolve_branches
from onnxamp._runtime.flow import Flow, flow_of
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.session import Provider
from onnxamp._runtime.shell import WEIGHTS_IN_GRAPH, Shell, take_weights
from onnxamp._runtime.side import run_alone
from onnxamp._runtime.values import Feed


def settled_flow(
    model: ModelProto,
    base_dir: str | PathLike[str] | None,
    feeds: Mapping[str, Feed],
    *,
    emulated: bool,
    provider: Provider = "cpu",
    before: Flow | None = None,
    like: Flow | None = None,
    arithmetic: Profile | None = None,
) -> Flow:
    """Prepare a model for a sample. One that meets other conditions, or leaves other inputs empty, takes another flow.

    Args:
        model: it is not changed.
        base_dir: folder of external data, if the model has any that is not loaded.
        feeds: a sample that the model accepts.
        emulated: as for :func:`~onnxamp._runtime.flow.make_flow`.
        provider: where conditions are computed.
        before: the result for an earlier sample, which is returned if this one takes the same branches.
        like: the flow of what the model was converted from.
        arithmetic: as for :func:`~onnxamp._runtime.flow.flow_of`.

    Raises:
        ModelError, OpsetError, ExternalDataError: as :func:`~onnxamp._runtime.flow.make_flow`.
        RuntimeFailure: a condition cannot be computed.
    """
    if (
        before is not None
        and not before.choices
        and not any(feed is None for feed in feeds.values())
    ):
        return before
    shell, taken = settle(model, base_dir, feeds, emulated=emulated, provider=provider)
    if before is not None and before.choices == taken:
        return before
    flow = flow_of(
        shell, emulated=emulated, shapes=shapes_of(feeds), like=like, arithmetic=arithmetic
    )
    return replace(flow, choices=taken)


def shapes_of(feeds: Mapping[str, Feed]) -> dict[str, tuple[int, ...]]:
    """The shapes of those that are tensors."""
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
    """The model as one sample runs it, functions inlined and branches taken; and the conditions that led to it.

    ``keep`` is as for :func:`~onnxamp._runtime.flow.make_flow`; other arguments and errors as :func:`settled_flow`.
    """
    shell = take_weights(model, base_dir, keep=keep)
    shell = replace(shell, model=_without_empty(inline_functions(shell.model), feeds))
    choices = {name: True for name, feed in feeds.items() if feed is None}
    if any(node.op_type == "If" for node in shell.model.graph.node):

        def decide(written: ModelProto, names: Sequence[str]) -> dict[str, bool]:
            conditions = _conditions(
                replace(shell, model=written), names, feeds, provider, emulated=emulated
            )
            choices.update(conditions)
            return conditions

        shell = replace(shell, model=resolve_branches(shell.model, decide))
    return shell, tuple(choices.items())


def _without_empty(model: ModelProto, feeds: Mapping[str, Feed]) -> ModelProto:
    """The model with optional inputs that the sample leaves empty computed inside, as they cannot be fed."""
    empty = [
        entry for entry in model.graph.input if entry.name in feeds and feeds[entry.name] is None
    ]
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
    shell: Shell,
    names: Sequence[str],
    feeds: Mapping[str, Feed],
    provider: Provider,
    *,
    emulated: bool,
) -> dict[str, bool]:
    """Values of conditions; only the nodes that they need are run."""
    own = copied(shell.model)  # the caller edits its own
    flow = flow_of(replace(shell, model=own), emulated=emulated, shapes=shapes_of(feeds))
    side = run_alone(Runner(flow, provider), feeds, names)
    return {name: bool(np.asarray(side.output(name)).reshape(-1)[0]) for name in names}
