"""Comparison of two decoders on texts: how well they predict them, and the tokens that they generate after prompts."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.records import record
from onnxamp._model.model import Model
from onnxamp._numerics.differences.metrics import Perplexity
from onnxamp._numerics.differences.rankings import log_softmax
from onnxamp._numerics.results import Parting
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.sessions.values import Feeds
from onnxamp._text.decoder import Decoder, logits_of


def reader_of(model: Model, generates: int) -> "DecoderReader | None":
    """Return what compares decoders of this form; None for a network that fills gaps in texts.

    Args:
        model: the reference.
        generates: the number of tokens to generate after a prompt.
    """
    decoder = Decoder.of(model)
    if not decoder.caches and not generates:
        return None  # its inputs and outputs have the same length
    return DecoderReader(decoder)


@record
class DecoderReader:
    """A :class:`~onnxamp._numerics.text_reader.TextReader` for decoders, which have the same roles of inputs."""

    decoder: Decoder

    def defined(self, feeds: Feeds, outputs: Outputs) -> Outputs:
        """Return outputs with zeros in rows of caches that no token has reached, which engines leave open."""
        lengths = [np.asarray(feeds[name]).shape[-1] for name in self.decoder.masks]
        seen = max(lengths, default=0)
        if not seen:
            return outputs
        defined = dict(outputs)
        for past, name in self.decoder.caches.items():
            cache = np.array(outputs[name])
            # Tokens are the last axis but one, or else the last one, as of BLOOM's keys, which then grows.
            if np.asarray(feeds[past]).shape[-1:] == cache.shape[-1:]:
                cache[..., seen:, :] = 0
            defined[name] = cache
        return defined

    def perplexity(
        self, feeds: Feeds, reference: Outputs, result: Outputs
    ) -> Perplexity | None:
        """As :meth:`~onnxamp._numerics.text_reader.TextReader.perplexity`."""
        tokens = np.asarray(feeds[self.decoder.tokens])
        both = logits_of(reference), logits_of(result)
        if (
            any(logits.shape[:-1] != tokens.shape for logits in both)
            or tokens.ndim != 2
        ):
            return None
        counts = np.ones(tokens.shape, bool)
        for name in self.decoder.masks & feeds.keys():
            mask = np.asarray(feeds[name])
            if mask.ndim == 2:
                # A mask also covers the tokens in the caches, which come first.
                counts &= mask[:, -tokens.shape[1] :] != 0
        # A prediction counts if neither its token nor the one that it predicts is padding.
        rows, places = np.nonzero(counts[:, :-1] & counts[:, 1:])
        following = tokens[rows, places + 1]
        vocabulary = min(logits.shape[-1] for logits in both)
        if not rows.size or int(following.max()) >= vocabulary:
            return None
        predicted = list(zip(rows, places, following, strict=True))
        sums = [_surprise(logits, predicted) for logits in both]
        return Perplexity.of(rows.size, *sums)

    def generated(
        self,
        models: tuple[Session, Session],
        feeds: Feeds,
        outputs: tuple[Outputs, Outputs],
        *,
        most: int,
        sample: int,
    ) -> Iterator[Parting]:
        """As :meth:`~onnxamp._numerics.text_reader.TextReader.generated`, greedily.

        Nothing follows on a sample unless it is one prompt, with empty caches.
        """
        if not most or not self.decoder.is_prompt(feeds):
            return
        if len(logits_of(outputs[0])) != 1:
            return
        inputs = (feeds, feeds)
        same = 0
        while True:
            logits, other = (logits_of(output)[0, -1] for output in outputs)
            token = int(logits.argmax())
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
                    gap=float(logits[token]) - float(logits[differing]),
                    same=same,
                )
                return
            same += 1
            mine = self.decoder.step(inputs[0], outputs[0], token)
            others = self.decoder.step(inputs[1], outputs[1], token)
            try:
                following = None if same == most else models[0].run(mine)
            except RuntimeFailure:  # a decoder ends where its positions do
                following = None
            if following is None:
                yield Parting("", 1, sample=sample, same=same)
                return
            inputs = (mine, others)
            outputs = (following, models[1].run(others))


def _surprise(
    logits: npt.NDArray[Any], predicted: Iterable[tuple[Any, Any, Any]]
) -> float:
    """Return the sum of the negative log-likelihoods, in nats, of tokens at positions (row, place, token)."""
    total = 0.0
    for row, place, token in predicted:
        # In float64, so that the error of the logits is measured and not that of this sum.
        total -= float(log_softmax(logits[row, place].astype(np.float64))[token])
    return total
