"""Decoders with caches: the inputs that take tokens, and how each step follows from the one before."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnxamp._errors import ArgumentError
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model
from onnxamp._runtime.engines import Outputs
from onnxamp._runtime.random_inputs import input_maker
from onnxamp._runtime.roles import Role
from onnxamp._runtime.sizes import dim_name, is_open
from onnxamp._runtime.values import Feeds

_TOKENS: Final = ("input_ids", "decoder_input_ids")
"""Names that exporters give to the input for tokens."""
LOGITS: Final = "logits"
"""Names that exporters give to the output for the next tokens."""
_CACHES: Final = (
    ("past_key_values.", "present."),
    ("past_key_values_", "present_key_values_"),
    ("past_", "present_"),
)
"""Prefixes of the names of cache inputs, and of the outputs that hold the caches after a run."""


def tokens_input(model: ModelProto) -> str | None:
    """Return the input of a decoder that takes tokens; None for a model that is no decoder."""
    given = {entry.name for entry in model.graph.input}
    if all(entry.name != LOGITS for entry in model.graph.output):
        return None
    return next((name for name in _TOKENS if name in given), None)


def logits_of(outputs: Outputs) -> npt.NDArray[Any]:
    """Return the logits that a decoder gives, [..., tokens, vocabulary]."""
    return np.asarray(outputs[LOGITS])


def reads_prompts(model: Model) -> bool:
    """Return whether a model is a decoder with caches that takes any number of tokens."""
    tokens = tokens_input(model.proto)
    for entry in model.proto.graph.input if tokens else ():
        dims = entry.type.tensor_type.shape.dim
        if entry.name == tokens and dims and not is_open(dims[-1]):
            return False
    return tokens is not None and bool(Decoder.of(model).caches)


class Decoder(NamedTuple):
    """The meaning of a decoder's inputs, by name.

    Attributes:
        tokens: takes the tokens, [batch, tokens].
        caches: the inputs that hold caches, with the outputs that hold them after a run.
        positions: count the tokens along their last axis.
        masks: hold a one for each token that was seen, along their last axis.
        flags: say whether the caches hold something.
        lengths: names of dimensions that are as long as a prompt.
    """

    tokens: str
    caches: Mapping[str, str]
    positions: frozenset[str]
    masks: frozenset[str]
    flags: frozenset[str]
    lengths: frozenset[str]

    @classmethod
    def of(cls, model: Model) -> "Decoder":
        """Return what the inputs of a model mean.

        Raises:
            ArgumentError: it takes no tokens, or gives no logits.
        """
        tokens, graph = tokens_input(model.proto), model.proto.graph
        outputs = {entry.name for entry in graph.output}
        if tokens is None:
            given = ", ".join(sorted(entry.name for entry in graph.input)[:5])
            raise ArgumentError(
                f"Prompts are for decoders, which take {' or '.join(_TOKENS)} and return {LOGITS}: this model takes"
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
        foreign = {
            dim_name(name, axis, dim)
            for name, entry in entries.items()
            if name != tokens and not caches[name] and roles[name] is Role.PLAIN
            for axis, dim in enumerate(entry.type.tensor_type.shape.dim)
        }

        def those(role: Role) -> frozenset[str]:
            return frozenset(name for name in entries if roles[name] is role)

        positions = those(Role.POSITION)
        masks = {name for name in those(Role.MASK) if lengths[name] not in foreign}
        return cls(
            tokens=tokens,
            caches={name: present for name, present in caches.items() if present},
            positions=positions,
            masks=frozenset(masks),
            flags=those(Role.CACHED),
            lengths=frozenset(lengths[name] for name in (tokens, *positions, *masks)),
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
        feeds = self.advanced(before, token)
        for name, present in self.caches.items():
            cache = np.asarray(outputs[present])
            if cache.size:
                feeds[name] = cache.astype(np.asarray(before[name]).dtype)
        return feeds

    def advanced(self, before: Feeds, token: int) -> dict[str, Any]:
        """Return the inputs that follow on a run, with the caches from before it.

        Those that the run leaves empty stay: the branch for steps of a merged decoder does not repeat the encoder's.
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
    return next((one for one in candidates if one in outputs), None)
