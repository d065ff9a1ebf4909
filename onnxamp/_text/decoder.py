"""Decoders with caches: the inputs that take tokens, how each step follows from the one before, and texts as inputs.

Each text is a prompt, and a step with the token that the model gives after it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, ValueInfoProto

from onnxamp._base import words
from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingPackageError,
)
from onnxamp._base.extensions import extensions
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.optional import require
from onnxamp._base.paths import as_path, cannot_read
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model, ModelSource, weight_bytes
from onnxamp._runtime.engines import Outputs, SampleCache, Session, on_cpu
from onnxamp._runtime.inputs.random_inputs import InputMaker, input_maker
from onnxamp._runtime.inputs.roles import Role
from onnxamp._runtime.inputs.sample_files import Spool, quoted
from onnxamp._runtime.inputs.samples import Samples, SampleSource, draw_of
from onnxamp._runtime.inputs.suited import suited
from onnxamp._runtime.sessions.values import Feeds, check_inputs
from onnxamp._runtime.sizes import dim_name, is_open

_NAMES: Final = extensions("comparisons")["texts"]
"""The names that exporters give to what makes a model a decoder."""
(LOGITS,) = _NAMES.outputs
"""The output for the next tokens."""
_CACHES: Final = (
    ("past_key_values.", "present."),
    ("past_key_values_", "present_key_values_"),
    ("past_", "present_"),
)
"""Prefixes of the names of cache inputs, and of the outputs that hold the caches after a run."""
TOKENIZER: Final = "tokenizer.json"
"""The name of a tokenizer's file in all software that uses the package tokenizers."""

_GENERATED: Final = 32
"""Tokens that are generated after each prompt, to compare two models."""

_BUILT_IN: Final = (
    "The river rises in the hills, and runs for ninety miles before it meets the sea.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)
_FEW: Final = 8
"""Tokens that are generated after each of these."""
_LARGE: Final = 1 << 30
"""Bytes of weights above which a decoder generates only on request, because each token takes a run."""
_WORDS: Final = 4
"""The smallest number of different tokens in a text whose language the tokenizer knows."""


def tokens_input(model: ModelProto) -> str | None:
    """Return the input of a decoder that takes tokens; None for a model that is no decoder."""
    given = {entry.name for entry in model.graph.input}
    if all(entry.name != LOGITS for entry in model.graph.output):
        return None
    return next((name for name in _NAMES.inputs if name in given), None)


def logits_of(outputs: Outputs) -> npt.NDArray[Any]:
    """Return the logits that a decoder gives, [..., tokens, vocabulary]."""
    return np.asarray(outputs[LOGITS])


def reads_prompts(model: Model) -> bool:
    """Return whether a model is a decoder with caches that takes any number of tokens."""
    tokens = tokens_input(model.proto)
    if tokens is None:
        return False
    for entry in model.proto.graph.input:
        dims = entry.type.tensor_type.shape.dim
        if entry.name == tokens and dims and not is_open(dims[-1]):
            return False
    return bool(Decoder.of(model).caches)


class Decoder(NamedTuple):
    """The meaning of a decoder's inputs, by name.

    Attributes:
        tokens: takes the tokens, [batch, tokens].
        caches: the inputs that hold caches, with the outputs that hold them after a run.
        positions: count the tokens along their last axis.
        masks: hold a one for each token that was seen, along their last axis.
        flags: say whether the caches hold something.
        lengths: names of dimensions that are as long as a prompt.
        past: names of dimensions of caches that grow with each run, which are empty before a prompt.
    """

    tokens: str
    caches: Mapping[str, str]
    positions: frozenset[str]
    masks: frozenset[str]
    flags: frozenset[str]
    lengths: frozenset[str]
    past: frozenset[str]

    @classmethod
    def of(cls, model: Model) -> "Decoder":
        """Return the roles of a model's inputs.

        Raises:
            ArgumentError: it takes no tokens, or gives no logits.
        """
        tokens = tokens_input(model.proto)
        graph = model.proto.graph
        outputs = {entry.name for entry in graph.output}
        if tokens is None:
            given = ", ".join(sorted(entry.name for entry in graph.input)[:5])
            raise ArgumentError(
                f"Prompts are for decoders, which take {' or '.join(_NAMES.inputs)} and return {LOGITS}: this model takes"
                f" {given} and returns {', '.join(sorted(outputs)[:5])}."
            )
        maker = input_maker(model.ask(graph_of))
        entries = {entry.name: entry for entry in maker.entries.values()}
        caches = {name: _present_of(name, outputs) for name in sorted(entries)}
        roles = {
            maker.entries[value].name: use.role for value, use in maker.uses.items()
        }
        lengths = {
            name: _length(entries[name].type.tensor_type.shape, name)
            for name in entries
        }
        # A mask of another input, such as an image, is as long as that input and not as the prompt.
        foreign = set[str]()
        for name, entry in entries.items():
            if name != tokens and not caches[name] and roles[name] is Role.PLAIN:
                dims = enumerate(entry.type.tensor_type.shape.dim)
                foreign.update(dim_name(name, axis, dim) for axis, dim in dims)

        def inputs_of(role: Role) -> frozenset[str]:
            return frozenset(name for name in entries if roles[name] is role)

        past = set[str]()
        results = {entry.name: entry for entry in graph.output}
        for name, present in caches.items():
            if present:
                past |= _growing(entries[name], results[present])
        positions = inputs_of(Role.POSITION)
        masks = {name for name in inputs_of(Role.MASK) if lengths[name] not in foreign}
        return cls(
            tokens=tokens,
            caches={name: present for name, present in caches.items() if present},
            positions=positions,
            masks=frozenset(masks),
            flags=inputs_of(Role.CACHED),
            lengths=frozenset(lengths[name] for name in (tokens, *positions, *masks)),
            past=frozenset(past),
        )

    def is_prompt(self, feeds: Feeds) -> bool:
        """Return whether a decoder accepts these tokens with empty caches, so that it can continue from there."""
        length = np.asarray(feeds[self.tokens]).shape[-1]
        masks = [
            np.asarray(feeds[name]).shape[-1] for name in self.masks if name in feeds
        ]
        if not self.caches or length == 0:
            return False
        if masks:
            return all(seen == length for seen in masks)
        return any(np.asarray(feeds[name]).size == 0 for name in self.caches)

    def step(self, before: Feeds, outputs: Outputs, token: int) -> dict[str, Any]:
        """Return the inputs that follow on a run.

        Args:
            before: the inputs of that run.
            outputs: its outputs, which include the caches.
            token: the token that is read next.
        """
        feeds = dict(before)
        tokens = np.asarray(before[self.tokens])
        feeds[self.tokens] = np.full_like(tokens[..., :1], token)
        for name in self.positions & before.keys():
            feeds[name] = np.asarray(before[name])[..., -1:] + 1
        for name in self.masks & before.keys():
            mask = np.asarray(before[name])
            feeds[name] = np.concatenate([mask, np.ones_like(mask[..., :1])], axis=-1)
        for name in self.flags & before.keys():
            feeds[name] = np.ones_like(np.asarray(before[name]))
        for name, present in self.caches.items():
            cache = np.asarray(outputs[present])
            # The branch for steps of a merged decoder does not repeat the encoder's caches: it leaves them empty.
            if cache.size:
                feeds[name] = cache.astype(np.asarray(before[name]).dtype)
        return feeds


def _length(shape: Any, name: str) -> str:
    """Return the name of the last axis of an input."""
    if not shape.dim:
        return ""
    return dim_name(name, len(shape.dim) - 1, shape.dim[-1])


def _present_of(name: str, outputs: set[str]) -> str | None:
    """Return the output that holds a cache after a run; None if the input is no cache."""
    candidates = (
        after + name.removeprefix(before)
        for before, after in _CACHES
        if name.startswith(before)
    )
    return next((candidate for candidate in candidates if candidate in outputs), None)


@dataclass(frozen=True, slots=True)
class Prompts(SampleSource):
    """Texts for a decoder with caches; accepted wherever samples are.

    Each text becomes two samples: a prompt with its tokens and empty caches, and a step with the most likely next token
    and the caches after the prompt. Inputs besides tokens, masks, positions and caches are random.

    Args:
        texts: the texts, or the path of a text file with one in each line; empty lines are skipped.
        tokenizer: the path of a tokenizer.json; None for the one beside the model, or in the folder above.
        generates: number of tokens that a comparison generates greedily after each prompt, as long as both models
            choose the same.

    Raises:
        ArgumentTypeError: an argument is of another type. ArgumentError: ``generates`` is negative.

    Example:
        >>> import onnxamp
        >>> prompts = onnxamp.Prompts(["Once upon a time", "The capital of France is"])
        >>> len(prompts.lines())
        2
    """

    texts: str | PathLike[str] | Iterable[str]
    tokenizer: str | PathLike[str] | None = None
    generates: int = _GENERATED

    _kind: ClassVar[str] = "prompt"
    """The name of one in reports."""

    def __post_init__(self) -> None:
        what = "a whole number of at least 0"
        checked_number("generates", self.generates, what, lambda n: n >= 0, WHOLE)
        if isinstance(self.texts, (str, PathLike)):
            return
        # An iterator gives its texts once, but they are read several times.
        texts = tuple(self.texts) if isinstance(self.texts, Iterable) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise ArgumentTypeError(
                "texts must be strings, or the path of a file with one in each line."
            )
        object.__setattr__(self, "texts", texts)

    def lines(self) -> list[str]:
        """Return the texts.

        Raises:
            ArgumentError: the file cannot be read, or there is no text.
        """
        texts: Iterable[str]
        if isinstance(self.texts, (str, PathLike)):
            path = as_path(self.texts)
            try:
                # splitlines would also split at separators that texts may hold.
                texts = path.read_text(encoding="utf-8-sig").split("\n")
            except (OSError, ValueError) as error:
                raise cannot_read(f"the prompts {quoted(path)}", error) from error
        else:
            texts = self.texts
        lines = [text for text in texts if text.strip()]
        if not lines:
            raise ArgumentError("There is no text among the prompts.")
        return lines

    def samples_of(
        self, model: ModelSource, seed: int = 0, reference: Session | None = None
    ) -> Samples:
        """Return the samples for a model: a prompt and a step for each text.

        Args:
            model: the decoder, with its weights.
            seed: seed of the inputs that do not follow from the text.
            reference: runs the model and stores its outputs; None for the CPU.

        Raises:
            ArgumentError: the model takes no tokens or gives no logits, or its tokenizer is missing.
            MissingPackageError: the package tokenizers is not installed.
        """
        opened = Model.of(model)
        tokens = self.tokens_of(opened)
        writer = PromptWriter(reference or on_cpu(opened), seed)
        spool = Spool(writer.samples(tokens), "file of prompts", 2 * len(tokens))
        named = words.count(len(tokens), self._kind)
        description = f"samples of {named} and the steps after"
        return Samples(description, spool, generates=self.generates)

    def tokens_of(self, model: Model) -> list[list[int]]:
        """Return the tokens of each text; raises as :meth:`samples_of`."""
        tokenizer = _tokenizer(model, self.tokenizer)
        return [_encoded(tokenizer, line) for line in self.lines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltIn(Prompts):
    """Texts for decoders whose user names none, and their tokens."""

    tokens: list[list[int]]
    _kind = "built-in prompt"

    def tokens_of(self, model: Model) -> list[list[int]]:
        """Return the tokens of each text."""
        del model
        return self.tokens


def built_in_prompts(model: Model) -> SampleSource | None:
    """Return short texts for a decoder that has a tokenizer; None where they do not suit it, or take long."""
    if weight_bytes(model.proto) > _LARGE or not reads_prompts(model):
        return None
    try:
        tokens = Prompts(_BUILT_IN).tokens_of(model)
    except (ArgumentError, MissingPackageError):
        return None
    outputs = {entry.name: entry for entry in model.proto.graph.output}
    dims = outputs[LOGITS].type.tensor_type.shape.dim
    words = (dims[-1].dim_value if dims else 0) or inf
    suits = all(len({*text}) >= _WORDS and max(text) < words for text in tokens)
    return _BuiltIn(_BUILT_IN, generates=_FEW, tokens=tokens) if suits else None


def _growing(cache: ValueInfoProto, present: ValueInfoProto) -> set[str]:
    """Return the names of the dimensions of a cache that differ in the output that holds it after a run."""
    before = cache.type.tensor_type.shape.dim
    after = present.type.tensor_type.shape.dim
    if len(before) != len(after):
        return set()
    return {
        dim_name(cache.name, axis, dim)
        for axis, (dim, other) in enumerate(zip(before, after, strict=True))
        if is_open(dim) and other.dim_param not in ("", dim.dim_param)
    }


class PromptWriter:
    """Writes samples of a decoder: prompts, and steps with the caches after them."""

    def __init__(self, reference: Session, seed: int) -> None:
        self._reference = reference
        self._seed = seed
        self.decoder = Decoder.of(reference.model)
        draw = draw_of(reference.model, seed)
        maker = draw.determined().maker()
        if maker.untold - self.decoder.lengths:
            # A session caches results by number, and prompts have the numbers of the random inputs.
            aside = replace(reference, outputs=SampleCache())
            maker = suited(draw, aside).maker()
        self._maker: InputMaker = maker

    def samples(self, texts: Iterable[Any]) -> Iterator[Feeds]:
        """Yield a prompt and a step for each text, which is a list of token ids."""
        for number, tokens in enumerate(texts):
            prompt = self.prompt(tokens)
            yield prompt
            feeds = check_inputs(self._reference.model.proto, prompt)
            outputs = self._reference.run_sample(2 * number, feeds)
            likely = int(logits_of(outputs)[0, -1].argmax())
            yield self.decoder.step(prompt, outputs, likely)

    def prompt(self, tokens: Any) -> dict[str, Any]:
        """Return the inputs for a prompt. All inputs except tokens, masks, positions and caches are random."""
        named = self._maker.named
        names = self.decoder.lengths & named.formulas.keys()
        past = {*named.pasts, *self.decoder.past} & named.formulas.keys()
        lengths = dict.fromkeys(past, 0) | dict.fromkeys(names, len(tokens))
        sample = self._maker.make(self._seed, 0, lengths)
        # Sliding caches have rows from the beginning, which are empty.
        for cache in self.decoder.caches:
            sample[cache] = np.zeros_like(np.asarray(sample[cache]))
        name = self.decoder.tokens
        like = np.asarray(sample[name])
        sample[name] = np.broadcast_to(tokens, like.shape).astype(like.dtype)
        return sample


def _tokenizer(model: Model, given: str | PathLike[str] | None) -> Any:
    """Return the tokenizer in a file, or in that beside the model or in the folder above.

    Raises:
        ArgumentError: there is none, or it cannot be read. MissingPackageError: the package is not installed.
    """
    require("tokenizers", "Prompts need tokenizers", "text")
    from tokenizers import Tokenizer  # noqa: PLC0415 - only prompts need it

    places = list[Path]()
    if given is not None:
        places = [as_path(given)]
    elif model.path is not None:
        # Exporters put models beside the tokenizer, or into a folder "onnx" below it.
        home = model.path.absolute().parent
        places = [home / TOKENIZER, home.parent / TOKENIZER]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        names = " and ".join(map(quoted, places)) or "a file beside the model"
        raise ArgumentError(
            f"Prompts need a tokenizer, but there is none: onnxamp looked for {names}."
        )
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except Exception as error:
        raise cannot_read(f"the tokenizer {quoted(path)}", error) from error
    # Each text is a sample of its own, whole and without padding.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text.

    Raises:
        ArgumentError: the tokenizer has none for it.
    """
    try:
        tokens: list[int] = tokenizer.encode(text).ids
    except Exception as error:  # the package raises no other type
        raise ArgumentError(
            f"The tokenizer does not take the prompt {text!r:.60}: {error}."
        ) from error
    if not tokens:
        raise ArgumentError(
            f"The tokenizer has no tokens for the prompt {text!r:.60}."
        )
    return tokens
