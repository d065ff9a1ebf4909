"""Comparison of two decoders on texts: how well they predict them, and the tokens that they generate after prompts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxamp._errors import RuntimeFailure
from onnxamp._numerics.compare import log_softmax
from onnxamp._numerics.metrics import Perplexity
from onnxamp._numerics.results import Parting
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.decoder import Decoder, logits_of
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.flow import DataflowGraph
from onnxamp._runtime.pieces import run_alone
from onnxamp._runtime.values import Feeds


def defined(decoder: Decoder, feeds: Feeds, outputs: Outputs) -> Outputs:
    """Return outputs with zeros in rows of caches that no token has reached, which engines leave open."""
    seen = max(
        (np.asarray(feeds[name]).shape[-1] for name in decoder.masks), default=0
    )
    caches = {name: np.array(outputs[name]) for name in decoder.caches.values()}
    for cache in caches.values() if seen else ():
        cache[..., seen:, :] = 0
    return {**outputs, **caches}


def perplexity(
    decoder: Decoder, feeds: Feeds, reference: Outputs, result: Outputs
) -> Perplexity | None:
    """Measure how well both models predict the tokens of a sample.

    Returns:
        None if no token of the sample follows another, or there are no logits for each of them.
    """
    tokens = np.asarray(feeds[decoder.tokens])
    both = logits_of(reference), logits_of(result)
    if any(logits.shape[:-1] != tokens.shape for logits in both) or tokens.ndim != 2:
        return None
    counts = np.ones(tokens.shape, bool)
    for mask in (np.asarray(feeds[name]) for name in decoder.masks if name in feeds):
        if mask.ndim == 2:
            counts &= mask[:, -tokens.shape[1] :] != 0
    rows, places = np.nonzero(counts[:, :-1] & counts[:, 1:])
    following = tokens[rows, places + 1]
    if not rows.size or int(following.max()) >= min(one.shape[-1] for one in both):
        return None
    sums = (
        sum(
            -float(log_softmax(logits[row, place].astype(np.float64))[token])
            for row, place, token in zip(rows, places, following, strict=True)
        )
        for logits in both
    )
    return Perplexity.of(rows.size, *sums)


def generated(
    decoder: Decoder,
    models: tuple[Session, Session],
    prompt: Feeds,
    outputs: tuple[Outputs, Outputs],
    *,
    most: int,
    sample: int,
) -> Iterator[Parting]:
    """Generate tokens greedily with a reference and a result, for as long as both choose the same.

    Args:
        decoder: the roles of their inputs.
        models: both.
        prompt: one sequence of tokens, with empty caches.
        outputs: the outputs of both after it.
        most: the largest number of tokens.
        sample: the number of the prompt.

    Raises:
        RuntimeFailure: the result does not run where the reference does.
    """
    feeds = (prompt, prompt)
    same = 0
    if not most or len(logits_of(outputs[0])) != 1:
        return
    while True:
        row, other = (logits_of(one)[0, -1] for one in outputs)
        token = int(row.argmax())
        differing = int(other.argmax())
        if token != differing:
            yield Parting(
                output="",
                sequences=1,
                parted=1,
                sample=sample,
                position=same,
                reference=token,
                result=differing,
                gap=float(row[token]) - float(row[differing]),
                same=same,
            )
            return
        same += 1
        mine, others = (
            decoder.step(before, made, token)
            for before, made in zip(feeds, outputs, strict=True)
        )
        try:
            following = None if same == most else models[0].run(mine)
        except RuntimeFailure:  # a decoder ends where its positions do
            following = None
        if following is None:
            yield Parting("", 1, sample=sample, same=same)
            return
        feeds = (mine, others)
        outputs = (following, models[1].run(others))


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
