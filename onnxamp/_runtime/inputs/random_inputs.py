"""Random inputs that a model accepts; inputs with a default get none.

=====================================  =====================================================================
input                                  numbers
=====================================  =====================================================================
indices into a table (Gather, ...)     uniform in [0, rows of the table); 0 if its size is unknown; as many tokens as
                                       there are features for them are the one that those replace
positions (by name)                    0, 1, 2, ... along the last axis, modulo the rows of the table; a decoder's begin
                                       behind what its caches hold
masks (by name, ``1 - x``, Cast to     per row (last axis) one or more ones, then zeros; the second row of three or more
bool, attention masks)                 has ones alone, and the third zeros alone, unless a constant of the model is
                                       infinite, or rows are those of sequences; ones alone in a decoder with caches,
                                       which counts its tokens by them
``key_padding_mask``                   the same rows, with True for zeros
masks that are added to scores         the same rows with 0 for ones, and the lowest number of float32, or of a
                                       narrower type, for zeros
``use_cache_branch``                   whether caches hold something
grids (by name)                        1 frame, and rows and columns that the patches fill
sizes of images (by name)              height and width of the images
timesteps (by name)                    uniform in 0..999
lengths (by name)                      the size of the first open dimension that is no leading one, or 1
factors (by name: scales, speeds)      uniform between 1/2 and 3/2
sizes (Reshape, Expand, Range,         uniform in 1..4
ConstantOfShape, TopK, Loop trips)
other floats                           standard normal, or in a domain (:mod:`onnxamp._runtime.inputs.finite`)
other bools                            uniform in {False, True}
other uint8                            uniform in 0..255, as in images
other integers                         uniform in {0, 1}: valid as index, flag, segment or length
strings                                "a"
sequences                              a list of two elements
optionals                              a value
=====================================  =====================================================================

Indices, masks and sizes are recognized through data movement, Casts and bodies, whatever the input's type.

Fixed dimensions have that size, open ones what :mod:`onnxamp._runtime.sizes` says. An input of unknown rank is a
matrix. All elements of a sequence have one shape, for which the same holds. Sizes that depend on each other in ways
that neither names nor ops show must be given in ``dims``.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, ValueInfoProto

from onnxamp._base.errors import ArgumentError
from onnxamp._graph.determined import Determined, determine, input_relations
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import Origin
from onnxamp._runtime.inputs.completed_uses import completed_uses
from onnxamp._runtime.inputs.domains import Domain, in_domain, moved_into_range
from onnxamp._runtime.inputs.random_feeds import random_feed, too_large
from onnxamp._runtime.inputs.random_masks import (
    MASKS,
    lacks_rows,
    mask_numbers,
    tells_padding,
)
from onnxamp._runtime.inputs.roles import Use
from onnxamp._runtime.inputs.shapes import dims_of, shape_of
from onnxamp._runtime.sessions.values import Feed
from onnxamp._runtime.sizes import Sizes, shape_within


def random_inputs(
    model: ModelProto, *, seed: int = 0, dims: Mapping[str, int] | None = None
) -> dict[str, Feed]:
    """Return seeded random inputs that suit the model, as described by the module's tables.

    Args:
        model: its weights may be missing.
        seed: non-negative. Numbers depend on it and on the input's own name alone.
        dims: sizes of named dimensions.

    Returns:
        By name, in the model's order: arrays of the declared type, lists of arrays for sequences.

    Raises:
        ArgumentError: ``dims`` names an unknown dimension or gives an impossible size, the seed is negative, or
            an input is of a type that cannot be generated (maps, sparse tensors), or too large.
    """
    return input_maker(Graph.of(model), dims).make(seed)


class InputMaker(NamedTuple):
    """Facts about a model's inputs, from which any number of samples can be generated.

    Attributes:
        entries: the inputs without a default, by value.
        named: their dimensions.
        dims: sizes that are given.
        tried: sizes in place of usual ones.
        determined: sizes that the model's weights require, if known.
        sizes: those of all open dimensions, by name.
        uses: how the model uses its inputs.
        ranges: the least and the largest number of inputs, by name.
        domains: where the numbers of inputs without a range lie, by name.
    """

    graph: Graph
    entries: Mapping[int, ValueInfoProto]
    named: Sizes
    dims: Mapping[str, int]
    tried: Mapping[str, int]
    determined: Determined | None
    sizes: Mapping[str, int]
    uses: Mapping[int, Use]
    ranges: Mapping[str, tuple[float, float]]
    domains: Mapping[str, Domain] = {}

    # -- samples -----------------------------------------------------------------------------------------------

    def make(
        self, seed: int, number: int = 0, lengths: Mapping[str, int] | None = None
    ) -> dict[str, Feed]:
        """Return the inputs of :func:`random_inputs` for a seed; raises the same.

        Args:
            seed: non-negative.
            number: position of the sample, which tells whose turn it is: a prompt's, or a step's of a decoder.
            lengths: sizes of dimensions in place of those of the turn; caches that slide stay as long as they are.
        """
        if seed < 0:
            raise ArgumentError(f"The seed must not be negative, but is {seed}.")
        lengths = lengths or {}
        sizes = self._sizes_of_turn(number, lengths)
        all_sizes = {**sizes, **lengths}
        past = next((all_sizes[name] for name in self.named.pasts), None)
        feeds = dict[str, Feed]()
        for value, entry in self.entries.items():
            use = self.uses[value]._replace(past=past)
            feeds[entry.name] = self._feed(entry, use, seed, sizes)
        return feeds

    def _feed(
        self, entry: ValueInfoProto, use: Use, seed: int, sizes: Mapping[str, int]
    ) -> Feed:
        """Return the numbers of one input, in its range or its domain."""
        name = entry.name
        # Each input has a generator, so that its numbers do not depend on the other inputs.
        generator = np.random.default_rng((seed, zlib.crc32(name.encode())))
        try:
            feed = random_feed(
                generator=generator, name=name, kind=entry.type, use=use, sizes=sizes
            )
        except MemoryError:
            raise too_large(name, shape_of(entry, sizes)) from None
        if not isinstance(feed, np.ndarray):
            return feed
        if name in self.ranges:
            return moved_into_range(generator, feed, self.ranges[name])
        if name in self.domains:
            return in_domain(generator, feed, self.domains[name])
        return feed

    def masked(
        self, feeds: Mapping[str, Feed], *, keeps: bool
    ) -> dict[str, npt.NDArray[Any]]:
        """Return masks in place of those of a sample, which keep every element or none.

        Masks that hold such rows anyway are left out, as are those of decoders, which count by them, and empty ones
        where they would make NaN.
        """
        changed = dict[str, npt.NDArray[Any]]()
        if self.named.pasts:
            return changed
        for value, entry in self.entries.items():
            use = self.uses[value]
            feed = feeds.get(entry.name)
            is_open = (keeps or use.may_be_empty) and entry.name not in self.ranges
            if (
                not is_open
                or use.role not in MASKS
                or not isinstance(feed, np.ndarray)
            ):
                continue
            if lacks_rows(feed.shape, use, keeps=keeps):
                kept = np.full(feed.shape, keeps)
                changed[entry.name] = mask_numbers(kept, feed.dtype, use)
        return changed

    def tells_padding(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an input tells the tokens of sequences from padding."""
        uses = (
            self.uses[at] for at, entry in self.entries.items() if entry.name == name
        )
        return any(tells_padding(shape, use) for use in uses)

    # -- sizes -------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """Number of kinds of samples: 2 for a decoder, which takes prompts and steps; else 1."""
        return len(self.named.turns(self.dims))

    def _sizes_of_turn(
        self, number: int, lengths: Mapping[str, int]
    ) -> Mapping[str, int]:
        turns = self.named.turns(self.dims)
        if len(turns) == 1 and not lengths:
            return self.sizes
        chosen = {**self.tried, **turns[number % len(turns)], **lengths}
        if self.determined is not None:
            windows = self._windows(self.determined)
            if windows and not lengths:
                chosen |= dict.fromkeys(self.named.pasts, max(windows.values()))
            chosen |= windows
            chosen = {**self.solved(chosen).sizes, **chosen}
        return self.named.resolve({**chosen, **self.dims})

    def _windows(self, determined: Determined) -> Mapping[str, int]:
        """Lengths of the caches that slide, which are as long as their windows."""
        return {
            name: determined.sizes[name]
            for name in self.named.pasts
            if name in determined.forced & determined.sizes.keys()
        }

    def sized(self, sizes: Mapping[str, int]) -> "InputMaker":
        """Return a generator of inputs with other sizes, and those that follow from them and the weights; given sizes
        stay.
        """
        determined = self.solved(sizes)
        maker = _maker(
            self.graph,
            self.entries,
            self.named,
            {**determined.sizes, **sizes, **self.dims},
            self.ranges,
        )
        return maker._replace(
            dims=self.dims,
            tried=sizes,
            determined=determined,
            domains=self.domains,
        )

    def solved(self, sizes: Mapping[str, int]) -> Determined:
        """Return the sizes that follow from these, from those given, and from the weights."""
        given = {**sizes, **self.dims}
        resolved = self.named.resolve(given)
        usual = {name: resolved[name] for name in self.named.plain}
        if usual.keys() <= given.keys():
            return Determined({}, frozenset())
        shapes = (
            (entry.name, shape_within(entry.type)) for entry in self.entries.values()
        )
        inputs = tuple(
            (name, dims_of(name, shape)) for name, shape in shapes if shape is not None
        )
        return determine(
            self.graph.ask(input_relations, inputs), usual, given, self.named.batches
        )

    @property
    def has_open(self) -> bool:
        """Whether the sizes of some dimensions other than batches are not given."""
        return any(
            name not in self.dims and name not in self.named.batches
            for name in self.named.plain
        )

    @property
    def untold(self) -> frozenset[str]:
        """Dimensions whose sizes follow from neither names nor weights, and may have to be tried."""
        named = self.named
        told = {*self.dims, *named.batches, *named.pasts, *named.news, *named.totals}
        if self.determined is not None:
            told |= self.determined.sizes.keys()
        return frozenset(named.plain) - told

    def shapes(self) -> Sequence[Shape | None]:
        """Return the shapes of the model's values for inputs of these sizes, by value."""
        entries = self.entries.values()
        tensors = (entry for entry in entries if entry.type.HasField("tensor_type"))
        return self.graph.shapes_of(
            {entry.name: shape_of(entry, self.sizes) for entry in tensors}
        )


def input_maker(
    graph: Graph,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> InputMaker:
    """Analyse the roles of a model's inputs.

    Args:
        graph: the model.
        dims: sizes of named dimensions.
        ranges: the least and the largest number of inputs by name, in place of the usual ones.

    Raises:
        ArgumentError: ``dims`` names an unknown dimension or gives an impossible size, or ``ranges`` an unknown input.
    """
    named = {
        graph.scopes[0].names[entry.name]: entry for entry in graph.model.graph.input
    }
    entries = {
        value: entry
        for value, entry in named.items()
        if graph.values[value].origin is Origin.INPUT
    }
    known = {entry.name for entry in entries.values()}
    for name in ranges or ():
        if name not in known:
            raise ArgumentError(
                f"input_ranges (--input-range): the model has no input {name!r}. Its inputs are {', '.join(sorted(known))}."
            )
    return _maker(graph, entries, Sizes.of(entries.values()), dims or {}, ranges or {})


def _maker(
    graph: Graph,
    entries: Mapping[int, ValueInfoProto],
    named: Sizes,
    dims: Mapping[str, int],
    ranges: Mapping[str, tuple[float, float]],
) -> InputMaker:
    """Return the facts about inputs with sizes that follow from those given, without those that weights require."""
    sizes = named.resolve(dims)
    return InputMaker(
        graph=graph,
        entries=entries,
        named=named,
        dims=dims,
        tried={},
        determined=None,
        sizes=sizes,
        uses=completed_uses(graph, entries, named, sizes),
        ranges=ranges,
    )
