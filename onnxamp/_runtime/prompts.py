"""Texts as inputs of a decoder: each is a prompt, and a step with the token that the model gives after it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model, ModelSource
from onnxamp._optional import require
from onnxamp._paths.paths import as_path, cannot_read
from onnxamp._runtime.draws import suited
from onnxamp._runtime.engines import on_cpu
from onnxamp._runtime.random_inputs import InputMaker
from onnxamp._runtime.sample_files import quoted
from onnxamp._runtime.samples import Samples, SampleSource, draw_of
from onnxamp._runtime.spool import Spool
from onnxamp._runtime.values import Feeds, check_inputs

TOKENIZER: Final = "tokenizer.json"
"""What the file of a tokenizer is called, by all software that uses the package tokenizers."""

_TOKENS: Final = ("input_ids", "decoder_input_ids")
"""What exporters call the input for tokens."""
_LOGITS: Final = "logits"
_CACHES: Final = (
    ("past_key_values.", "present."),
    ("past_key_values_", "present_key_values_"),
    ("past_", "present_"),
)
"""How names of inputs with caches begin, and those of the outputs that hold them after a run."""


@dataclass(frozen=True, slots=True)
class Prompts(SampleSource):
    """Texts for a decoder with caches, wherever samples are taken.

    Each text makes two samples: a prompt with its tokens and empty caches, and a step with the most likely next token
    and the caches that the prompt left. Inputs besides tokens, masks, positions and caches are random.

    Args:
        texts: the texts, or the path of a text file with one in each line; empty lines do not count.
        tokenizer: the path of a tokenizer.json; None for the one beside the model, or in the folder above.

    Example:
        >>> import onnxamp
        >>> prompts = onnxamp.Prompts(["Once upon a time", "The capital of France is"])
        >>> len(prompts.lines())
        2
    """

    texts: str | PathLike[str] | Iterable[str]
    tokenizer: str | PathLike[str] | None = None

    def lines(self) -> list[str]:
        """Return the texts.

        Raises:
            ArgumentError: the file cannot be read, or there is no text.
        """
        texts: Iterable[str]
        if isinstance(self.texts, (str, PathLike)):
            path = as_path(self.texts)
            try:
                texts = path.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as error:
                raise cannot_read(f"the prompts {quoted(path)}", error) from error
        else:
            texts = self.texts
        found = [text for text in texts if text.strip()]
        if not found:
            raise ArgumentError("There is no text among the prompts.")
        return found

    def samples_of(self, model: ModelSource, seed: int = 0) -> Samples:
        """Return the samples for a model: a prompt and a step for each text.

        Args:
            model: the decoder, with its weights.
            seed: seed of what no text tells.

        Raises:
            ArgumentError: the model takes no tokens or gives no logits, or its tokenizer is missing.
            MissingPackageError: the package tokenizers is not installed.
        """
        opened = Model.of(model)
        tokenizer = _tokenizer(opened, self.tokenizer)
        decoder = _Decoder(opened, seed)
        lines = self.lines()
        tokens = (np.array(tokenizer.encode(line).ids, np.int64) for line in lines)
        spool = Spool(decoder.samples(tokens), "file of prompts", 2 * len(lines))
        texts = "1 prompt" if len(lines) == 1 else f"{len(lines)} prompts"
        return Samples(f"samples of {texts} and the steps after", spool)


def takes_prompts(model: Model) -> bool:
    """Return whether a model is a decoder, with caches or without."""
    given = {entry.name for entry in model.proto.graph.input}
    outputs = {entry.name for entry in model.proto.graph.output}
    return not given.isdisjoint(_TOKENS) and _LOGITS in outputs


class _Decoder:
    """Makes samples of a decoder from tokens."""

    def __init__(self, model: Model, seed: int) -> None:
        self._executable = on_cpu(model)
        graph = model.proto.graph
        given = {entry.name for entry in graph.input}
        outputs = {entry.name for entry in graph.output}
        if not takes_prompts(model):
            raise ArgumentError(
                f"Prompts are for decoders, which take {' or '.join(_TOKENS)} and give {_LOGITS}: this model takes"
                f" {', '.join(sorted(given)[:5])} and gives {', '.join(sorted(outputs)[:5])}."
            )
        self._tokens = next(name for name in _TOKENS if name in given)
        self._caches = {
            name: present
            for name in sorted(given)
            if (present := _present_of(name, outputs)) is not None
        }
        self._maker: InputMaker = suited(draw_of(model, seed), self._executable).maker()
        self._seed = seed

    def samples(self, texts: Iterable[Any]) -> Iterator[Feeds]:
        """Yield a prompt and a step for each text, which is an array of token ids."""
        for tokens in texts:
            prompt = self._sample(tokens, past=0)
            yield prompt
            outputs = self._executable.run(
                check_inputs(self._executable.model.proto, prompt)
            )
            likely = np.asarray(outputs[_LOGITS])[0, -1].argmax()
            step = self._sample(np.array([likely]), past=tokens.size)
            for name, present in self._caches.items():
                if np.shape(outputs[present]) == np.shape(step[name]):
                    step[name] = outputs[present]
            yield step

    def _sample(self, tokens: Any, past: int) -> dict[str, Any]:
        number = 1 if past else 0
        sample = self._maker.make(self._seed, number, self._lengths(len(tokens), past))
        like = np.asarray(sample[self._tokens])
        sample[self._tokens] = np.broadcast_to(tokens, like.shape).astype(like.dtype)
        return sample

    def _lengths(self, new: int, past: int) -> Mapping[str, int]:
        """Sizes of the dimensions that depend on how many tokens there are."""
        named = self._maker.named
        return {**dict.fromkeys(named.pasts, past), **dict.fromkeys(named.news, new)}


def _present_of(name: str, outputs: set[str]) -> str | None:
    """The output that holds a cache after a run; None for what is no cache."""
    candidates = (
        after + name.removeprefix(before)
        for before, after in _CACHES
        if name.startswith(before)
    )
    return next((one for one in candidates if one in outputs), None)


def _tokenizer(model: Model, given: str | PathLike[str] | None) -> Any:
    """The tokenizer in a file, or in that beside the model or in the folder above.

    Raises:
        ArgumentError: there is none, or it cannot be read. MissingPackageError: the package is not installed.
    """
    require("tokenizers", "Prompts need tokenizers", "text")
    from tokenizers import Tokenizer  # noqa: PLC0415 - only prompts need it

    homes = (
        []
        if model.path is None
        else [model.path.absolute().parent, model.path.absolute().parent.parent]
    )
    places = (
        [as_path(given)] if given is not None else [home / TOKENIZER for home in homes]
    )
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = (
            " and ".join(quoted(place) for place in places) or "a file beside the model"
        )
        raise ArgumentError(
            f"Prompts need a tokenizer, and there is none: looked for {looked}."
        )
    try:
        return Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except Exception as error:
        raise cannot_read(f"the tokenizer {quoted(path)}", error) from error
