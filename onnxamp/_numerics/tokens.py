"""Where sequences of tokens part: outputs that name the largest of a row of logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.flow import Flow


@dataclass(frozen=True, slots=True)
class Parting:
    """Sequences of tokens that differ, over all samples.

    Attributes:
        output: the output that holds them, [..., positions].
        sequences: number of sequences; ``parted`` of them differ.
        sample, sequence, position: where the first that differs begins to differ.
        reference, result: the tokens there.
        gap: by how much the reference's logit of its own token exceeds that of the result's token there; None if it
            is not known. A small gap is a tie that any rounding may turn.
    """

    output: str
    sequences: int
    parted: int
    sample: int
    sequence: int
    position: int
    reference: int
    result: int
    gap: float | None

    def and_then(self, later: "Parting") -> "Parting":
        """With those of a later sample, or of one in which nothing parts."""
        sequences, parted = self.sequences + later.sequences, self.parted + later.parted
        return replace(self if self.parted else later, sequences=sequences, parted=parted)


def token_outputs(flow: Flow) -> Iterator[tuple[str, str]]:
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


def find_parting(
    output: str, sample: int, reference: Any, result: Any, logits: Callable[[], npt.NDArray[Any]]
) -> Parting | None:
    """Compare the tokens of one sample; None if they are no arrays [sequences, positions] of one shape.

    Args:
        logits: computes what the reference chose its tokens from; called only if tokens differ.
    """
    if not (isinstance(reference, np.ndarray) and isinstance(result, np.ndarray)):
        return None
    if reference.ndim != 2 or reference.shape != result.shape:
        return None
    differs = reference != result
    parted = np.flatnonzero(differs.any(-1))
    if not len(parted):
        return Parting(
            output=output,
            sequences=len(reference),
            parted=0,
            sample=sample,
            sequence=0,
            position=0,
            reference=0,
            result=0,
            gap=None,
        )
    row = int(parted[0])
    position = int(differs[row].argmax())
    token, other = int(reference[row, position]), int(result[row, position])
    gap = _gap(logits(), reference, row * reference.shape[1] + position, token, other)
    return Parting(
        output=output,
        sequences=len(reference),
        parted=len(parted),
        sample=sample,
        sequence=row,
        position=position,
        reference=token,
        result=other,
        gap=gap,
    )


def _gap(
    logits: npt.NDArray[Any], tokens: npt.NDArray[Any], place: int, token: int, other: int
) -> float | None:
    """The gap at a place; None if the logits are in another order than the tokens."""
    table = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    if len(table) != tokens.size or not np.array_equal(table.argmax(-1), tokens.ravel()):
        return None
    return float(table[place, token] - table[place, other])
