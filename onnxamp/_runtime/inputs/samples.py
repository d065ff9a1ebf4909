"""Samples of a model's inputs, for calibration and validation: each is read when it is needed.

=====================  ==============================================================================================
source                 samples
=====================  ==============================================================================================
``.npz`` file          one: its arrays by name (numpy.savez)
``.json`` file         one per object of its list, or the one object that it is: arrays by name, as nested lists of
                       numbers or as Polygraphy saves them (``--save-inputs``, ``polygraphy.json.save_json``)
folder                 one per ``.npz`` and ``.json`` file, in natural order of their names (2 before 10)
dict of arrays         one
array                  one, of a model with one input
list of these          one per item. A tuple holds arrays in the order of the model's inputs; what follows them, such
                       as labels, is left out
other iterable         likewise: a generator, or a loader of PyTorch. Items are taken one by one, when they are needed,
                       and kept for another pass, beyond 64 MB in files (:mod:`onnxamp._runtime.inputs.sample_files`)
SampleSource           what it makes of the model, as Prompts make a prompt and a step of a decoder of each text
Dataset of Ray         one per row: a column is an input; rows are read where they are needed
nothing                random inputs (:mod:`onnxamp._runtime.inputs.random_inputs`), each with a seed of its own
=====================  ==============================================================================================

:func:`as_samples` accepts all of these. Random ones have sizes with which the model runs; if errors are random, there
are enough of them to estimate the error of an output. :func:`onnxamp._runtime.sessions.values.check_inputs` tells
whether a sample fits a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, takewhile
from itertools import count as counting
from operator import length_hint
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto

from onnxamp._base import words
from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.paths import as_path, cannot_read, is_remote
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import fed_inputs
from onnxamp._model.sources import FileStamp, note_sources
from onnxamp._runtime.engines import SampleCache, Session, on_cpu
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.inputs.finite import with_finite_outputs
from onnxamp._runtime.inputs.random_inputs import InputMaker, input_maker
from onnxamp._runtime.inputs.sample_counts import further_count, usual_count
from onnxamp._runtime.inputs.sample_files import (
    Spool,
    file_readers,
    folder_readers,
    quoted,
)
from onnxamp._runtime.inputs.suited import suited
from onnxamp._runtime.sessions.values import Feed, Feeds, as_array, is_array
from onnxamp._runtime.sizes import listed


def is_dataset(given: Any) -> bool:
    """Return whether this is a Ray Dataset. Ray need not be installed."""
    return type(given).__module__.partition(".")[0] == "ray" and hasattr(
        given, "to_numpy_refs"
    )


def row_readers(dataset: Any) -> list[Callable[[], dict[str, Feed]]]:
    """Return a reader of each row. The dataset is computed and its rows counted now, on its cluster."""
    import ray  # noqa: PLC0415 - there is one, as there is a dataset

    blocks = dataset.to_numpy_refs()
    # Counting needs no CPU of the cluster, so it does not wait for a free one.
    length_of = ray.remote(num_cpus=0)(_length)
    counts = ray.get([length_of.remote(block) for block in blocks])
    readers: list[Callable[[], dict[str, Feed]]] = []
    for block, count in zip(blocks, counts, strict=True):
        readers += [partial(read_row, block, row) for row in range(count)]
    return readers


def read_row(block: Any, row: int) -> dict[str, Feed]:
    """Return a row of a block, wherever on the cluster that is."""
    import ray  # noqa: PLC0415

    return {name: as_array(column[row]) for name, column in ray.get(block).items()}


def _length(block: Any) -> int:
    return len(next(iter(block.values()), ()))


Sample: TypeAlias = Feeds


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a model's inputs. Each is read again on every access, so that only one at a time is in memory.

    Iterating and indexing give dicts of arrays by input name (lists of arrays for sequences, None for empty optionals).
    The number of samples of an iterator is known only at its end, so ``len`` exhausts it.

    Example:
        >>> import onnxamp
        >>> samples = onnxamp.random_samples("models/encoder.onnx", 2)
        >>> len(samples)
        2
        >>> sorted(samples[0])
        ['attention_mask', 'input_ids']
    """

    description: str
    """The source of the samples, as reports name it."""
    readers: Sequence[Callable[[], Sample]]
    draw: Draw | None = None
    """The source of random samples."""
    generates: int = 0
    """Tokens that a decoder generates greedily after each prompt when two are compared."""
    may_grow: bool = False
    """Whether their number was not asked for, so that more may be drawn if an error is close to its limit."""
    first: int = 0
    """How many were compared before more were drawn; 0 if none were."""

    @property
    def made_up(self) -> bool:
        """Whether the numbers are random."""
        return self.draw is not None

    def __len__(self) -> int:
        return len(self.readers)

    @property
    def counted(self) -> int | None:
        """Their number; None while an iterator may return more."""
        readers = self.readers
        if not isinstance(readers, Spool) or readers.is_ended:
            return len(readers)
        return None

    @property
    def expected(self) -> int:
        """Their number, or the iterator's own estimate; 0 if unknown."""
        if self.counted is None and isinstance(self.readers, Spool):
            return self.readers.expected and max(self.readers.expected, self.taken)
        return len(self)

    @property
    def taken(self) -> int:
        """Their number so far."""
        if isinstance(self.readers, Spool):
            return self.readers.taken
        return len(self.readers)

    @property
    def summary(self) -> str:
        """The description, with the number of samples that an iterator has returned so far."""
        if not isinstance(self.readers, Spool):
            return self.description
        return f"{words.count(self.taken, 'sample')}{self.description.removeprefix('samples')}"

    def has(self, number: int) -> bool:
        """Return whether there is a sample of that number; this advances an iterator up to it."""
        if isinstance(self.readers, Spool):
            return self.readers.has(number)
        return number < len(self.readers)

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of samples for as long as there are any."""
        return takewhile(self.has, counting())

    def forget(self, number: int) -> None:
        """Release the samples before a number, except for the first."""
        if isinstance(self.readers, Spool):
            self.readers.forget(number)

    def __iter__(self) -> Iterator[Sample]:
        return (read() for read in self.readers)

    def __getitem__(self, index: int) -> Sample:
        return self.readers[index]()


def held_samples(description: str, every: Iterable[Sample]) -> Samples:
    """Return samples that are in memory."""
    return Samples(description, [partial(_itself, sample) for sample in every])


def _itself(sample: Sample) -> Sample:
    return sample


class SampleSource(ABC):
    """A function that makes samples for a given model."""

    __slots__ = ()

    @abstractmethod
    def samples_of(
        self, model: ModelSource, seed: int = 0, reference: Session | None = None
    ) -> Samples:
        """Return the samples for a model; ``seed`` is for inputs that are not given; ``reference`` keeps its
        outputs.
        """


SamplesLike: TypeAlias = (
    Samples | SampleSource | str | PathLike[str] | Sample | Iterable[Any]
)
"""The forms of samples that public functions accept; see the module's table."""


def given_samples(given: Any, model: ModelSource) -> Samples:
    """Return samples that are in memory, or come out of a loader.

    Raises:
        ArgumentTypeError: they are of another type. ArgumentError: an item has too few arrays.
    """
    if is_dataset(given):
        rows = row_readers(given)
        return Samples(f"{words.count(len(rows), 'row')} of a Ray Dataset", rows)
    if isinstance(given, Mapping) or is_array(given):
        return Samples(
            "the given inputs", [partial(dict, _sample(given, given, model))]
        )
    if not isinstance(given, Iterable):
        raise _wrong_type(f"not {type(given).__name__}")
    if not isinstance(given, (list, tuple)):
        return _streamed(given, model)
    samples = [_sample(item, given, model) for item in given]
    left = map(_left, given, samples)
    without = _without(max(left, default=0))
    return Samples(
        f"{words.count(len(given), 'given sample')}{without}",
        [partial(dict, item) for item in samples],
    )


def _streamed(given: Iterable[Any], model: ModelSource) -> Samples:
    """Return samples from an iterable, which is read once."""
    items = iter(given)
    kind = type(given).__name__
    first = next(items, None)
    if first is None:
        return Samples("no samples", [])
    left = _left(first, _sample(first, given, model))
    source = (_sample(item, given, model) for item in chain([first], items))
    spool = Spool(source, kind, length_hint(given))
    spool.has(1)  # so that a single sample is recognized
    return Samples(f"samples of a {kind}{_without(left)}", spool)


def _left(item: Any, sample: Sample) -> int:
    """Return how many arrays of an item are left out."""
    return len(item) - len(sample) if _is_tuple(item) else 0


def _without(left: int) -> str:
    return f", without the last {words.count(left, 'array')} of each" if left else ""


def _is_tuple(item: Any) -> bool:
    return isinstance(item, (tuple, list))


def _sample(item: Any, given: Any, model: ModelSource) -> Sample:
    """Return the arrays of an item, by input name."""
    if isinstance(item, Mapping):
        return {name: as_array(feed) for name, feed in item.items()}
    graph = (model if isinstance(model, ModelProto) else Model.of(model).proto).graph
    names = [entry.name for entry in fed_inputs(graph)]
    if is_array(item):
        fits = len(names) == 1
        feeds = [item]
    else:
        # Labels, which follow, may be numbers and texts.
        fits = _is_tuple(item) and all(map(is_array, item[: len(names)]))
        feeds = item
    if not fits:
        raise _wrong_type(
            f"not a {type(given).__name__} that holds a {type(item).__name__}"
        )
    if len(feeds) < len(names):
        raise ArgumentError(
            f"A sample holds {words.count(len(feeds), 'array')}, but the inputs are {', '.join(names)}."
        )
    return dict(zip(names, map(as_array, feeds), strict=False))


def _wrong_type(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        "samples must be a Samples object, the path of an .npz file, a JSON file or a folder of them, a dict of arrays"
        " by input name, or an iterable of such dicts, of tuples of arrays in the order of the model's inputs, or of"
        f" arrays if it has one input, {what}."
    )


def load_samples(path: str | PathLike[str]) -> Samples:
    """Return the samples in a file or folder.

    This reads names, and looks through a JSON file for its samples, but keeps no arrays.

    Args:
        path: an ``.npz`` file (one sample: its arrays by input name), a JSON file (a list of objects, or one object, of
            nested lists or of arrays as Polygraphy saves them), or a folder of such files, one sample each, read in
            natural order of their names.

    Returns:
        The samples, which read their arrays on access.

    Raises:
        ArgumentTypeError: ``path`` is not a path.
        ArgumentError: there is no such file, or it is of another kind. A broken file raises this when its
            sample is read.

    Example:
        >>> import numpy, onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     numpy.savez(f"{folder}/1.npz", input_ids=[[1, 2, 3]], attention_mask=[[1, 1, 0]])
        ...     onnxamp.load_samples(folder)[0]["input_ids"].shape
        (1, 3)
    """
    if not isinstance(path, (str, PathLike)):
        raise ArgumentTypeError(
            f"path must be a string or a path, not {type(path).__name__}."
        )
    path = as_path(path)
    try:
        # Samples are read later, when the working folder may be another.
        place = path if is_remote(path) else path.absolute()
        readers = folder_readers(place) if place.is_dir() else file_readers(place)
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise cannot_read(f"inputs from {quoted(path)}", error) from error
    if not is_remote(path):
        files = {reader.args[0] for reader in readers}
        note_sources({file: FileStamp.of(file.stat()) for file in files})
    return Samples(f"{words.count(len(readers), 'sample')} of {quoted(path)}", readers)


def random_samples(
    model: ModelSource,
    count: int = 1,
    *,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
) -> Samples:
    """Return random samples that a model accepts: token ids stay inside their tables, masks are ones and then zeros,
    ...

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph. Its weights are not needed.
        count: number of samples, at least 1.
        seed: non-negative. Each sample depends only on the seed and on its position.
        dims: sizes of dynamic dimensions by name, or as "input[axis]" of those without one. Other dimensions have
            the size that weights require, such as the channels of a convolution. If there is none, leading dimensions
            are 1, and all others 8. If the model does not run with these sizes, commands and functions that use random
            samples by default try others.

    Returns:
        Samples whose arrays have the shapes and dtypes that the model declares.

    Raises:
        ArgumentTypeError: ``model`` is of another type.
        ArgumentError: ``count`` or ``seed`` is too small. Reading a sample raises this if ``dims`` names no dimension
            of the model, or if the model has an input that cannot be random (a map, a sparse tensor).
        ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> samples = onnxamp.random_samples("models/encoder.onnx", dims={"batch": 4})
        >>> samples[0]["input_ids"].shape, samples[0]["input_ids"].dtype
        ((4, 8), dtype('int64'))
    """
    return drawn(draw_of(model, seed, dims).determined(), count)


def draw_of(
    model: ModelSource,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Draw:
    """Return the generator of :func:`random_samples`; raises the same errors."""
    _check_whole("The seed", seed)
    if seed < 0:
        raise ArgumentError(f"The seed must not be negative, but is {seed}.")
    if dims is not None and not isinstance(dims, Mapping):
        raise ArgumentTypeError(
            f"dims must be a dict from names to sizes, not {type(dims).__name__}."
        )
    # Protos may lack their weights.
    source = model if isinstance(model, ModelProto) else Model.of(model)

    @cache
    def maker() -> InputMaker:  # the graph is analyzed when the first sample is read
        if isinstance(source, ModelProto):
            return input_maker(Graph.of(source), dims, ranges)
        return input_maker(source.ask(graph_of), dims, ranges)

    return Draw(maker, seed)


def _check_whole(what: str, number: object) -> None:
    """Check that a number is whole.

    Raises:
        ArgumentTypeError: it is not.
    """
    # In Python, a bool is an int.
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
        raise ArgumentTypeError(f"{what} must be a whole number, not {number!r}.")


def drawn(draw: Draw, count: int = 1) -> Samples:
    """Return the first samples of a draw.

    Raises:
        ArgumentError: ``count`` is too small.
        ArgumentTypeError: it is not a whole number.
    """
    _check_whole("The number of samples", count)
    if count < 1:
        raise ArgumentError(
            f"The number of samples must be at least 1, but is {count}."
        )
    several = "" if count == 1 else f"{count} samples"
    facts = filter(None, (several, f"seed {draw.seed}", draw.told, listed(draw.sizes)))
    return Samples(
        f"random inputs ({', '.join(facts)})",
        [partial(draw.make, number) for number in range(count)],
        draw,
    )


def _verdict_samples(draw: Draw, count: int) -> Samples:
    """Return as many samples of a draw as a verdict takes. It reads them several times, so they stay in memory if they
    fit.
    """
    cache = SampleCache()
    samples = drawn(draw, count)
    readers = [partial(_read, draw, cache, number) for number in range(count)]
    return replace(samples, readers=readers, may_grow=True)


def _read(draw: Draw, cache: SampleCache, number: int) -> Sample:
    """Return a sample of a draw, from memory if it is there."""
    if number in cache.kept:
        return dict(cache.kept[number])
    sample = draw.make(number)
    cache.keep(number, sample)
    return sample


def as_samples(
    samples: SamplesLike | None,
    model: ModelSource,
    *,
    count: int | None = 1,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    reference: Session | None = None,
    engines: tuple[str | None, ...] = (),
) -> Samples:
    """Return the samples for any form that public functions accept; at least one.

    Args:
        samples: Samples, a path, a Ray Dataset, a dict of arrays, or an iterable of dicts, tuples or arrays, which must
            have an end. Tensors with a method ``numpy`` are arrays. None for random samples of ``model``, which all
            other arguments are about.
        model, seed, dims: as for :func:`onnxamp.random_samples`. If it does not run with the usual sizes, others take
            their place.
        count: how many; None for as many as a verdict takes.
        ranges: the least and the largest number of inputs by name, in place of the usual ones.
        reference: what results are compared with, which keeps its outputs of the first sample; None for the model.
        engines: what results run on, or are meant for, where they get a verdict.

    Raises:
        ArgumentTypeError: ``samples`` is of another type.
        ArgumentError: there is no sample, or as :func:`onnxamp.load_samples` and :func:`onnxamp.random_samples`.
    """
    if samples is None:
        model = Model.of(model)
        reference = reference or on_cpu(model)
        draw = suited(draw_of(model, seed, dims, ranges), reference)
        draw = with_finite_outputs(draw, reference)
        if count is not None:
            return drawn(draw, count)
        return _verdict_samples(draw, usual_count(reference, draw, *engines))
    if isinstance(samples, SampleSource):
        return samples.samples_of(model, seed, reference)
    if isinstance(samples, (str, PathLike)):
        return load_samples(samples)
    if not isinstance(samples, Samples):
        samples = given_samples(samples, model)
    if not samples.has(0):
        raise ArgumentError("There is no sample to run the model on.")
    return samples


def further(samples: Samples, share: float) -> Samples | None:
    """Return more random samples, the given ones first, for a verdict that is close; None if there are enough.

    Args:
        samples: the samples that were compared.
        share: the largest error, as a share of its limit.
    """
    if samples.draw is None or not samples.may_grow:
        return None
    count = further_count(len(samples), share)
    if count is None:
        return None
    more = _verdict_samples(samples.draw, count)
    readers = (*samples.readers, *more.readers[len(samples) :])
    return replace(more, readers=readers, first=samples.first or len(samples))
