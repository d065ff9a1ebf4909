"""Comparison of the tokens that ArgMax chooses, in models whose outputs are tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxamp._facts.ops import op_facts, op_key
from onnxamp._numerics.results import Parting
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.pieces import run_alone
from onnxamp._runtime.sessions.values import Feeds


def _token_outputs(flow: DataflowGraph) -> Iterator[tuple[str, str]]:
    """Outputs of a model that ArgMax gives, with the value whose rows it searches."""
    carriers = op_facts().carriers
    for output in flow.outputs:
        name = output
        while name in flow.maker:
            node = flow.nodes[flow.maker[name]]
            if op_key(node) == "ArgMax":
                yield output, node.input[0]
            if op_key(node) not in carriers:
                break
            name = node.input[0]


def chosen_tokens(
    model: Session, feeds: Feeds, reference: Outputs, result: Outputs, sample: int
) -> Iterator[Parting]:
    """Compare the tokens that ArgMax chooses in both models: arrays [sequences, positions] of one shape.

    Args:
        model: the reference, which runs again for logits where tokens differ.
        feeds: the sample.
        reference: the outputs of the reference. result: those of the result.
        sample: the number of the sample.
    """
    executor = model.prepare(feeds)
    for output, logits in _token_outputs(executor.flow):
        mine = reference[output]
        other = result[output]
        are_arrays = isinstance(mine, np.ndarray) and isinstance(other, np.ndarray)
        if not are_arrays or mine.ndim != 2 or mine.shape != other.shape:
            continue
        differs = mine != other
        parted = np.flatnonzero(differs.any(-1))
        if not len(parted):
            yield Parting(output, len(mine), sample=sample)
            continue
        row = int(parted[0])
        position = int(differs[row].argmax())
        tokens = int(mine[row, position]), int(other[row, position])
        run = run_alone(executor, feeds, [logits], model.budget)
        place = row * mine.shape[1] + position
        yield Parting(
            output=output,
            sequences=len(mine),
            parted=len(parted),
            sample=sample,
            sequence=row,
            position=position,
            reference=tokens[0],
            result=tokens[1],
            gap=_gap(run.output(logits), mine, place, *tokens),
        )


def _gap(
    logits: npt.NDArray[Any],
    tokens: npt.NDArray[Any],
    place: int,
    token: int,
    other: int,
) -> float | None:
    """Return the gap at a place; None if the logits are in another order than the tokens."""
    table = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    if len(table) != tokens.size or not np.array_equal(
        table.argmax(-1), tokens.ravel()
    ):
        return None
    return float(table[place, token] - table[place, other])
