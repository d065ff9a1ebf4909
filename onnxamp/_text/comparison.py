"""Comparison of two decoders on texts: how well they predict them, and the tokens that they generate after prompts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxamp._base.errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.compare import log_softmax
from onnxamp._numerics.metrics import Perplexity
from onnxamp._numerics.results import Parting
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.values import Feeds
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


@dataclass(frozen=True, slots=True)
class DecoderReader:
    """A :class:`~onnxamp._numerics.text_reader.TextReader` for decoders, which have the same roles of inputs."""

    decoder: Decoder

    def defined(self, feeds: Feeds, outputs: Outputs) -> Outputs:
        """Return outputs with zeros in rows of caches that no token has reached, which engines leave open."""
        seen = max(
            (np.asarray(feeds[name]).shape[-1] for name in self.decoder.masks),
            default=0,
        )
        caches = {
            name: np.array(outputs[name]) for name in self.decoder.caches.values()
        }
        for cache in caches.values() if seen else ():
            cache[..., seen:, :] = 0
        return {**outputs, **caches}

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
        for mask in (
            np.asarray(feeds[name]) for name in self.decoder.masks if name in feeds
        ):
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
                self.decoder.step(before, made, token)
                for before, made in zip(inputs, outputs, strict=True)
            )
            try:
                following = None if same == most else models[0].run(mine)
            except RuntimeFailure:  # a decoder ends where its positions do
                following = None
            if following is None:
                yield Parting("", 1, sample=sample, same=same)
                return
            inputs = (mine, others)
            outputs = (following, models[1].run(others))
