"""Sizes for the open dimensions of a model's inputs.

=====================================  =====================================================================
dimension                              size
=====================================  =====================================================================
named in ``dims``                      ``dims[name]``
a formula ("past + 1", "a * b")        what it gives: names, whole numbers, ``+``, ``-``, ``*`` (or ``x``), ``//``
                                       and brackets; names are doubled until it gives at least 1
"total_..." of "past_..." and "..."    the sum of the two; one new token where only "past_..." has a name
"past_..." with "..."                  of a decoder: 0 of 8 in its prompts, 8 of 1 in its steps, which take turns
determined by weights or other inputs  what they say, where the usual size does not run: the channels of a Conv
                                       (:mod:`onnxamp._graph.determined`)
patches of images, beside their grid   16, four rows of four
features that go among tokens          4 of 8
first axis of an input                 1, a batch; likewise the same name at any other axis (the first axis of a
                                       one-dimensional input counts only if the name occurs nowhere else)
other                                  8; equal names have equal sizes
=====================================  =====================================================================

A dimension without a name is called after its input and its place there: "input[1]". A name that occurs only in
formulas is also a size: 1 if it names a batch, else 8.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from onnx import TensorProto, TensorShapeProto, TypeProto, ValueInfoProto

from onnxamp._base.errors import ArgumentError, suggestion

BATCH: Final = 1
OTHER: Final = 8
"""Sizes of dynamic dimensions: leading ones, and all others."""

_TRIED: Final = (16, 32, 64, 1, 224, 1024)
"""Sizes that networks need if 8 is too small, not divisible, or too many tokens at once; the last is for sound."""

_JOINED: Final = OTHER + BATCH
"""A usual cache with one new token, whose dimension leads a mask and so counts as a batch."""

_DOUBLINGS: Final = 8
"""How often a size is doubled at most: from 8 to 2,048."""

_IMAGE: Final = re.compile("height|width")
_SIDES: Final = (*_TRIED, 384, 336, 256, 448, 512, 128)
"""Dimensions of images, whose sizes differ from those of texts, and the sizes to try for both sides."""

_PAST: Final = "past_"
GRID: Final = re.compile("grid_thw$")
"""Inputs that hold the numbers of frames, rows and columns of patches for each image."""

_PATCHES = 16
_FEATURES = 4
"""Rows of a matrix made from images or sound: the patches before a tower, and the features after it."""

_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_Formula = ast.expr


class Sizes(NamedTuple):
    """The open dimensions of a model's inputs."""

    formulas: Mapping[str, _Formula | None]
    """Every dimension's formula; None for a plain name."""
    batches: frozenset[str]
    """Names of leading dimensions."""
    unnamed: frozenset[str]
    """The dimensions that have no name of their own."""
    counted: Mapping[str, int]
    """Leading dimensions that are no batches, but patches or features, with their usual sizes."""

    @classmethod
    def of(cls, entries: Iterable[ValueInfoProto]) -> "Sizes":
        """Return the sizes of the given inputs."""
        entries = list(entries)
        counted = _counted(entries)
        leading = set[str]()
        elsewhere = set[str]()
        alone = set[str]()
        unnamed = set[str]()
        for entry, shape in _shapes(entries):
            # The only axis of an input may count tokens or a batch; other inputs show which.
            first = leading if len(shape.dim) > 1 else alone
            for axis, dim in enumerate(shape.dim):
                if is_open(dim):
                    name = dim_name(entry.name, axis, dim)
                    (elsewhere if axis else first).add(name)
                    unnamed |= {name} - {dim.dim_param}
        formulas = {
            name: _formula(name) for name in sorted(leading | elsewhere | alone)
        }
        within = set[str]()
        for formula in filter(None, formulas.values()):
            parts = ast.walk(formula)
            within.update(part.id for part in parts if isinstance(part, ast.Name))
        within -= formulas.keys()
        named_batch = {name for name in within if "batch" in name.lower()}
        batches = leading | (alone - elsewhere) | named_batch
        return cls(
            formulas | dict.fromkeys(sorted(within)),
            frozenset(batches - counted.keys()),
            frozenset(unnamed),
            counted,
        )

    @property
    def plain(self) -> list[str]:
        """The names that are no formulas."""
        return [name for name, formula in self.formulas.items() if formula is None]

    def resolve(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Return the size of every dimension.

        Raises:
            ArgumentError: ``dims`` names an unknown dimension or gives an impossible size.
        """
        for name, size in dims.items():
            if name not in self.formulas:
                listed = (
                    ", ".join(map(repr, sorted(self.formulas)))
                    or "no named dimensions"
                )
                text = f"The model's inputs have no dimension {name!r}; they have {listed}."
                raise ArgumentError(text + suggestion(self.formulas, name))
            is_whole = isinstance(size, (int, np.integer)) and not isinstance(
                size, bool
            )
            if not is_whole or size < 0:
                raise ArgumentError(
                    f"Dimension {name!r} cannot have the size {size!r}."
                )
        usual = {name: BATCH if name in self.batches else OTHER for name in self.plain}
        sizes = {**usual, **self.counted, **{name: int(dims[name]) for name in dims}}
        for name, (past, new) in self.totals.items():
            if name not in dims:
                sizes[name] = sizes[past] + (sizes[new] if new else 1)
        asked = {
            name: formula
            for name, formula in self.formulas.items()
            if formula is not None and name not in dims
        }
        for formula in asked.values():
            self._enlarge(formula, sizes, dims)
        for name, formula in asked.items():
            sizes[name] = max(_value(formula, sizes), 0)
        return sizes

    def _enlarge(
        self, formula: _Formula, sizes: dict[str, int], given: Collection[str]
    ) -> None:
        """Double the sizes of names in a formula until it gives one, as in "height / 32"; caches may be empty."""
        parts = (part.id for part in ast.walk(formula) if isinstance(part, ast.Name))
        fixed = {*given, *self.batches, *self.counted, *self.totals}
        free = [name for name in parts if name not in fixed]
        if any(name.startswith(_PAST) for name in free):
            return
        for _ in range(_DOUBLINGS):
            if _value(formula, sizes) > 0:
                break
            sizes.update({name: 2 * sizes[name] for name in free})

    @property
    def totals(self) -> dict[str, tuple[str, str | None]]:
        """Total lengths -> the past and new lengths that they are the sum of, by the names that exporters use."""
        known = set(self.plain)
        totals = {}
        for name in known:
            length = name.removeprefix("total_")
            if name != length and f"{_PAST}{length}" in known:
                totals[name] = f"{_PAST}{length}", length if length in known else None
        return totals

    @property
    def pasts(self) -> list[str]:
        """The names of the lengths of a decoder's caches, which exporters call "past_..."."""
        return [name for name in self.plain if name.startswith(_PAST)]

    @property
    def news(self) -> list[str]:
        """Names of the number of new tokens of a decoder, not counting those in its caches."""
        lengths = {name.removeprefix(_PAST) for name in self.pasts}
        return [name for name in self.plain if name in lengths]

    def turns(self, given: Collection[str]) -> list[dict[str, int]]:
        """Return the alternating sizes of a decoder: for a prompt with empty caches, and for a later token.

        Those in ``given`` stay. A model without caches, or without a name for its new tokens, does not alternate: it
        has one turn without sizes.
        """
        pasts = [name for name in self.pasts if name not in given]
        if not pasts or not self.news:
            return [{}]
        new = [name for name in self.news if name not in given]
        return [dict.fromkeys(pasts, 0), dict.fromkeys(new, 1)]

    def others(self, given: Collection[str]) -> Iterator[dict[str, int]]:
        """Yield sizes to try if the usual ones do not run: for all names except batches together, for each alone, for
        both sides of images, and finally for each alone the length of a cache with one new token.

        Those in ``given`` stay. A dimension without a name may also be a batch: finally, each is tried with all others
        at 1.
        """
        fixed = {*given, *self.batches, *self.counted, *self.totals, *self.pasts}
        free = [name for name in self.plain if name not in fixed]
        ones = {name: 1 for name in free if name in self.unnamed}

        if free:
            for size in _TRIED:
                yield dict.fromkeys(free, size)
                if len(free) > 1:
                    yield from ({name: size} for name in free)
                if len(ones) > 1 and size > 1:
                    yield from (ones | {name: size} for name in ones)
        sides = [name for name in free if _IMAGE.search(name)]
        if sides:
            yield from (dict.fromkeys(sides, size) for size in _SIDES)
        if len(free) > 1:
            yield from ({name: _JOINED} for name in free)


def _counted(entries: Sequence[ValueInfoProto]) -> dict[str, int]:
    """Return the leading dimensions that are not batches, with their usual sizes.

    They are those of matrices of patches, which come with their grid, and of features, which come with tokens.
    """
    leading = {}
    for entry, shape in _shapes(entries):
        if shape.dim and is_open(shape.dim[0]):
            leading[entry.name] = dim_name(entry.name, 0, shape.dim[0])
    names = [entry.name for entry in entries]
    has_grid = any(map(GRID.search, names))
    has_tokens = "input_ids" in names
    shared = Counter(leading.values())
    counted = {}
    for entry in entries:
        kind = entry.type.tensor_type
        size = None
        if has_grid:
            size = _PATCHES
        elif has_tokens and "features" in entry.name:
            size = _FEATURES
        is_matrix = kind.elem_type in _FLOATS and len(kind.shape.dim) == 2
        name = leading.get(entry.name, "")
        # A dimension that several inputs share is their batch.
        if is_matrix and size is not None and shared[name] == 1:
            counted[name] = size
    return counted


def is_open(dim: TensorShapeProto.Dimension) -> bool:
    """Return whether a dimension has no size; some exporters write -1 for that."""
    return not dim.HasField("dim_value") or dim.dim_value < 0


def dim_name(entry: str, axis: int, dim: TensorShapeProto.Dimension) -> str:
    """Return the name of an open dimension of an input."""
    return dim.dim_param or f"{entry}[{axis}]"


def listed(sizes: Mapping[str, int]) -> str:
    """Return sizes as text."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def shape_within(kind: TypeProto) -> TensorShapeProto | None:
    """Return the shape of a tensor, or of the innermost elements of optionals and sequences; one of unknown rank is a
    matrix. None if there are no tensors inside.
    """
    while (held := kind.WhichOneof("value")) in ("optional_type", "sequence_type"):
        kind = getattr(kind, held).elem_type
    if not kind.HasField("tensor_type"):
        return None
    tensor = kind.tensor_type
    return tensor.shape if tensor.HasField("shape") else _MATRIX


_MATRIX: Final = TensorShapeProto(
    dim=[TensorShapeProto.Dimension(), TensorShapeProto.Dimension()]
)
"""Two open dimensions."""


def _shapes(
    entries: Iterable[ValueInfoProto],
) -> Iterator[tuple[ValueInfoProto, TensorShapeProto]]:
    """Yield the inputs that hold tensors, each with the shape of its tensors."""
    for entry in entries:
        shape = shape_within(entry.type)
        if shape is not None:
            yield entry, shape


def _formula(name: str) -> _Formula | None:
    """Return the formula that a dimension's name is; None if it is a name ("batch-size"), or nothing that can be
    read.
    """
    # A hyphen or slash between letters joins words; exporters write spaces around operators.
    if re.search(r"[^\W\d][-/][^\W\d]", name):
        return None
    text = re.sub(r"(?<=\w) x (?=\w)", " * ", name.strip())
    try:
        formula = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # names are arbitrary text: nested brackets exhaust the parser
    is_plain = isinstance(formula, ast.Name | ast.Constant)
    if is_plain or not all(map(_is_known, ast.walk(formula))):
        return None
    return formula


def _is_known(part: ast.AST) -> bool:
    if isinstance(part, ast.Constant):
        return type(part.value) is int
    return isinstance(part, (ast.BinOp, ast.Name, ast.Load, *_OPERATORS))


def _quotient(left: int, right: int) -> int:
    return left // right if right else 0


_OPERATORS: Final[Mapping[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _quotient,
    ast.Div: _quotient,
}


def _value(formula: _Formula, sizes: Mapping[str, int]) -> int:
    """Return the value of a formula, from the leaves up: division rounds down, and by zero it gives zero."""
    values: dict[_Formula, int] = {}
    parts = [part for part in ast.walk(formula) if isinstance(part, ast.expr)]
    for part in reversed(parts):  # ast.walk yields an expression before its operands
        if isinstance(part, ast.Name):
            values[part] = sizes[part.id]
        elif isinstance(part, ast.Constant):
            values[part] = int(str(part.value))
        elif isinstance(part, ast.BinOp):
            compute = _OPERATORS[type(part.op)]
            values[part] = compute(values[part.left], values[part.right])
    return values[formula]
