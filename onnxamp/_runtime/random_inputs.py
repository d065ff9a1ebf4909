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
masks that are added to scores         the same rows with 0 for ones, and the lowest number of float32, or of a
                                       narrower type, for zeros
``use_cache_branch``                   whether caches hold something
grids (by name)                        1 frame, and rows and columns that the patches fill
sizes of images (by name)              height and width of the images
lengths (by name)                      the size of the first open dimension that is no leading one, or 1
factors (by name: scales, speeds)      uniform between 1/2 and 3/2
sizes (Reshape, Expand, Range,         uniform in 1..4
ConstantOfShape, TopK, Loop trips)
other floats                           standard normal, or in a domain (:mod:`onnxamp._runtime.finite`)
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import isqrt, prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import (
    ModelProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    ValueInfoProto,
    helper,
)

from onnxamp._base.errors import ArgumentError
from onnxamp._facts.ops import attribute
from onnxamp._graph.determined import Determined, determine, input_relations
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import Origin
from onnxamp._runtime.domains import Domain, in_domain, in_range
from onnxamp._runtime.random_masks import (
    MASKS,
    lacks_rows,
    mask_numbers,
    random_mask,
    tells_padding,
)
from onnxamp._runtime.roles import Role, Use, input_use
from onnxamp._runtime.sizes import Sizes, dim_name, is_open, shape_within
from onnxamp._runtime.values import Feed

_MOST_BYTES: Final = 16 << 30
"""Larger inputs are not generated, because such a shape must be a mistake."""


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
    """Facts about a model's inputs, from which any number of samples can be generated."""

    graph: Graph
    entries: Mapping[int, ValueInfoProto]
    """The inputs without a default, by value."""
    named: Sizes
    dims: Mapping[str, int]
    """Sizes that are given."""
    tried: Mapping[str, int]
    """Sizes in place of usual ones."""
    determined: Determined | None
    """Sizes that the model's weights require, if known."""
    sizes: Mapping[str, int]
    """Of all open dimensions by name."""
    uses: Mapping[int, Use]
    ranges: Mapping[str, tuple[float, float]]
    """By name: the least and the largest number of inputs."""
    domains: Mapping[str, Domain] = {}
    """By name: where the numbers of inputs without a range lie."""

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
        sizes = self._sizes_of_turn(number, lengths or {})
        past = next(
            ({**sizes, **(lengths or {})}[name] for name in self.named.pasts), None
        )
        feeds = {}
        for value, entry in self.entries.items():
            # Each input has a generator, so that its numbers do not depend on the other inputs.
            generator = np.random.default_rng((seed, zlib.crc32(entry.name.encode())))
            try:
                feed = _feed(
                    generator=generator,
                    name=entry.name,
                    kind=entry.type,
                    use=self.uses[value]._replace(past=past),
                    sizes=sizes,
                )
            except MemoryError:
                raise _too_large(entry.name, shape_of(entry, sizes)) from None
            ends = self.ranges.get(entry.name)
            if ends is not None and isinstance(feed, np.ndarray):
                feed = in_range(generator, feed, ends)
            elif entry.name in self.domains and isinstance(feed, np.ndarray):
                feed = in_domain(generator, feed, self.domains[entry.name])
            feeds[entry.name] = feed
        return feeds

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
            (name, _dims(name, shape)) for name, shape in shapes if shape is not None
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

    def masked(
        self, feeds: Mapping[str, Feed], *, keeps: bool
    ) -> dict[str, npt.NDArray[Any]]:
        """Return masks in place of those of a sample, which keep every element or none.

        Masks that hold such rows anyway are left out, as are those of decoders, which count by them, and empty ones
        where they would make NaN.
        """
        found = dict[str, npt.NDArray[Any]]()
        for value, entry in () if self.named.pasts else self.entries.items():
            use = self.uses[value]
            feed = feeds.get(entry.name)
            is_open = (keeps or use.may_be_empty) and entry.name not in self.ranges
            if use.role not in MASKS or not is_open:
                continue
            if isinstance(feed, np.ndarray) and lacks_rows(
                feed.shape, use, keeps=keeps
            ):
                kept = np.full(feed.shape, keeps)
                found[entry.name] = mask_numbers(kept, feed.dtype, use)
        return found

    def tells_padding(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an input tells the tokens of sequences from padding."""
        uses = (
            self.uses[at] for at, entry in self.entries.items() if entry.name == name
        )
        return any(tells_padding(shape, use) for use in uses)

    def shapes(self) -> Sequence[Shape | None]:
        """Return the shapes of the model's values for inputs of these sizes, by value."""
        entries = self.entries.values()
        tensors = (entry for entry in entries if entry.type.HasField("tensor_type"))
        return self.graph.shapes_of(
            {entry.name: shape_of(entry, self.sizes) for entry in tensors}
        )


class Draw(NamedTuple):
    """Random samples of a seed. Each depends on it and on its own position alone."""

    maker: Callable[[], InputMaker]
    """The facts about the model, which the first sample determines."""
    seed: int
    sizes: Mapping[str, int] = {}
    """Sizes in place of usual ones with which the model does not run: weights determine them, or they were tried."""
    tried: tuple[Mapping[str, int], ...] = ()
    """Sizes with which it does not run."""
    told: str = ""
    """The domain of its numbers, in words; "" for the usual ones."""

    @classmethod
    def by(
        cls, maker: InputMaker, seed: int, sizes: Mapping[str, int], told: str = ""
    ) -> "Draw":
        """Return the draw of a maker that is known already."""
        return cls(maker=lambda: maker, seed=seed, sizes=sizes, told=told)

    def make(self, number: int) -> dict[str, Feed]:
        """Return the sample of a position; raises as :func:`random_inputs`."""
        seed = self.seed
        if number:  # the first sample is that of random_inputs for the same seed
            sequence = np.random.SeedSequence((self.seed, number))
            seed = int(sequence.generate_state(1, np.uint64)[0])
        return self.maker().make(seed, number)

    def others(self) -> Iterator["Draw"]:
        """Yield copies with sizes to try if the usual ones do not run, starting with those that the weights
        determine.
        """
        maker = self.maker()
        determined = maker.determined or maker.solved({})
        if maker.determined is None and determined.sizes:
            yield Draw(cache(partial(maker.sized, {})), self.seed, determined.sizes)
        for tried in maker.named.others({*maker.dims, *determined.forced}):
            sizes = {**maker.solved(tried).sizes, **tried}
            yield Draw(cache(partial(maker.sized, tried)), self.seed, sizes)

    def determined(self) -> "Draw":
        """Return the same with the sizes that the weights determine, which the first sample has to find out."""
        return self._replace(maker=cache(lambda: self.maker().sized({})))


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
    sizes = named.resolve(dims)
    shapes = graph.shapes_at(sizes)

    length = sizes.get(next(_inner_dims(entries.values()), ""), 1)
    count = next((sizes[name] for name in named.counted), 0)
    extent = _extent(entries, sizes)
    may_be_empty = not _has_infinite(graph)
    uses = {}
    for value in entries:
        use = input_use(graph, value, shapes)
        completed = _completed(use, length, count, extent)
        uses[value] = completed._replace(may_be_empty=may_be_empty)
    return InputMaker(
        graph=graph,
        entries=entries,
        named=named,
        dims=dims,
        tried={},
        determined=None,
        sizes=sizes,
        uses=uses,
        ranges=ranges,
    )


def _inner_dims(entries: Iterable[ValueInfoProto]) -> Iterator[str]:
    """Yield the names of the open dimensions of tensors, apart from leading ones."""
    for entry in entries:
        for axis, dim in enumerate(entry.type.tensor_type.shape.dim):
            if axis and is_open(dim):
                yield dim_name(entry.name, axis, dim)


def _completed(use: Use, length: int, count: int, extent: tuple[int, ...]) -> Use:
    """Return a use, completed with the numbers that follow from the sizes of other inputs.

    Args:
        use: the use.
        length: the size of the axis that lengths count along.
        count: the number of patches or features.
        extent: height and width of images.
    """
    match use.role:
        case Role.LENGTH:
            return use._replace(bound=length)
        case Role.GRID:
            # The divisor closest to the root makes the grid as square as it can be.
            rows = next(
                n for n in range(isqrt(max(count, 1)), 0, -1) if count % n == 0
            )
            return use._replace(row=(1, rows, count // rows))
        case Role.EXTENT:
            return use._replace(row=extent)
        case Role.INDEX if use.marker is not None:
            return use._replace(marked=count)
    return use


def _extent(
    entries: Mapping[int, ValueInfoProto], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the height and width of the images among the inputs."""
    shapes = (
        shape_of(entry, sizes)
        for entry in entries.values()
        if entry.type.tensor_type.elem_type == TensorProto.FLOAT
    )
    return next((shape[-2:] for shape in shapes if len(shape) > 3), (1, 1))


def has_shape(kind: TypeProto) -> bool:
    """Return whether a type is that of a tensor of known rank."""
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape")


def _dims(name: str, shape: TensorShapeProto) -> tuple[int | str, ...]:
    """Return the dimensions of an input: sizes, and names of those that are open."""
    return tuple(
        dim_name(name, axis, dim) if is_open(dim) else dim.dim_value
        for axis, dim in enumerate(shape.dim)
    )


def _feed(
    generator: np.random.Generator,
    name: str,
    kind: TypeProto,
    use: Use,
    sizes: Mapping[str, int],
) -> Feed:
    if kind.HasField("optional_type"):
        kind = kind.optional_type.elem_type
    if kind.HasField("sequence_type"):
        return [
            _feed(generator, name, kind.sequence_type.elem_type, use, sizes)
            for _ in range(2)
        ]
    elem = kind.tensor_type.elem_type
    if not kind.HasField("tensor_type") or elem == TensorProto.UNDEFINED:
        raise ArgumentError(
            f"Cannot generate input {name!r}: onnxamp runs models whose inputs are tensors, sequences or optionals, and"
            " converts others without running them (--no-validate)."
        )
    shape = _shape(name, kind, sizes)
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    # Numbers are drawn as float64 or int64, eight bytes each, and cast after that.
    if prod(shape) * max(dtype.itemsize, 8) > _MOST_BYTES:
        raise _too_large(name, shape)
    return _tensor(generator, dtype, shape, use)


def _shape(name: str, kind: TypeProto, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = shape_within(kind)
    dims = () if shape is None else _dims(name, shape)
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)


def shape_of(entry: ValueInfoProto, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an input whose open dimensions have these sizes."""
    return _shape(entry.name, entry.type, sizes)


def _too_large(name: str, shape: tuple[int, ...]) -> ArgumentError:
    return ArgumentError(
        f"Cannot generate input {name!r}: its shape {list(shape)} needs more memory than there is, or more than"
        f" {_MOST_BYTES >> 30} GiB. Give inputs (--inputs), or smaller sizes (--dim)."
    )


def _tensor(
    generator: np.random.Generator,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    use: Use,
) -> npt.NDArray[Any]:
    numbers: npt.NDArray[Any] | int | float
    if dtype.kind == "O":
        return np.full(shape, "a", dtype)
    if use.role is Role.INDEX:
        numbers = _indices(generator, shape, use)
    elif use.row and shape[-1:] == (len(use.row),):
        numbers = np.broadcast_to(use.row, shape)
    elif use.role is Role.POSITION:
        past = use.past or 0
        places = _last_axis(shape) + past
        bound = use.bound or places.size + past + 1
        numbers = np.broadcast_to(places % bound, shape)
    elif use.role is Role.CACHED:
        numbers = np.full(shape, bool(use.past))
    elif use.role in MASKS:
        numbers = mask_numbers(random_mask(generator, shape, use), dtype, use)
    elif use.role is Role.LENGTH:
        numbers = np.full(shape, use.bound or 1)
    elif use.role is Role.FACTOR:
        numbers = generator.uniform(0.5, 1.5, shape)
    elif use.role is Role.SIZE:
        numbers = generator.integers(1, 5, shape)
    elif dtype.kind in "biu":
        numbers = generator.integers(0, 256 if dtype == np.uint8 else 2, shape)
    else:
        numbers = generator.standard_normal(shape)
    return np.asarray(numbers).astype(dtype)


def _has_infinite(graph: Graph) -> bool:
    """Return whether a number of the model is infinite: a row that it masks as a whole is not a number."""
    held = (
        attribute(node.proto, "value_float") for node in graph.nodes_of({"Constant"})
    )
    tensors = graph.constants.tensors.items()
    stored = [
        value
        for value, tensor in tensors
        if tensor.data_location != TensorProto.EXTERNAL
    ]
    numbers = [graph.constants.scalar(value) for value in stored]
    return any(
        number is not None and not np.isfinite(number) for number in (*held, *numbers)
    )


def _indices(
    generator: np.random.Generator, shape: tuple[int, ...], use: Use
) -> npt.NDArray[np.int64]:
    """Return indices, of which the first ``use.marked`` are the marker, if there is one, and no others."""
    bound = max(use.bound or 1, 1)
    numbers = generator.integers(0, bound, shape)
    if use.marker is not None and use.marked:
        numbers[numbers == use.marker] = (use.marker + 1) % bound
        numbers.reshape(-1)[: use.marked] = use.marker
    return numbers


def _last_axis(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return 0, 1, 2, ... along the last axis; a scalar 0 for scalars."""
    return np.arange(shape[-1]) if shape else np.zeros((), np.int64)
