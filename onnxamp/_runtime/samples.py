"""Samples of a model's inputs, for calibration and validation: read when they are needed, one at a time.

=====================  ==============================================================================================
source                 samples
=====================  ==============================================================================================
``.npz`` file          one: its arrays by name (numpy.savez)
``.json`` file         the objects of its list, or the one object that it is: arrays by name, as nested lists of
                       numbers or as Polygraphy saves them (``--save-inputs``, ``polygraphy.json.save_json``)
folder                 one per ``.npz`` and ``.json`` file, in natural order of their names (2 stands before 10)
nothing                made-up inputs (:mod:`onnxamp._runtime.random_inputs`), another seed for each
=====================  ==============================================================================================

Whether a sample fits a model is for :func:`onnxamp._runtime.inputs.check_inputs` to say.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from onnx import ModelProto

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._runtime.random_inputs import input_maker
from onnxamp._runtime.sample_files import ARCHIVE_START, json_samples, quoted, read_json, read_npz
from onnxamp._runtime.values import Feed

Sample: TypeAlias = Mapping[str, Feed]

_SUFFIXES: Final = frozenset({".npz", ".json"})


@dataclass(frozen=True, slots=True)
class Samples:
    """A fixed number of samples, each read anew whenever it is asked for: no more than one need be in memory.

    ``description`` says in reports where they come from.
    """

    description: str
    readers: Sequence[Callable[[], Sample]]
    made_up: bool = False

    def __len__(self) -> int:
        return len(self.readers)

    def __iter__(self) -> Iterator[Sample]:
        return (read() for read in self.readers)

    def __getitem__(self, index: int) -> Sample:
        return self.readers[index]()

    def hint(self, error: RuntimeFailure) -> str:
        """What may help where a model fails on a sample, as a sentence behind the error; "" where nothing would.

        Made-up inputs may be what a node fails on; where a model does not even load, they are not to blame.
        """
        is_suspect = self.made_up and "could not run" in str(error)
        return " Real inputs (--inputs data.npz) or sizes (--dim name=N) may help." if is_suspect else ""


def load_samples(path: str | PathLike[str]) -> Samples:
    """The samples of a file or a folder; the module's table says what may be in them.

    Reads names, and where in a JSON file samples begin, but no arrays.

    Raises:
        ArgumentError: there is nothing, or nothing of that kind. A file that turns out to be broken when its sample
            is read raises the same.
    """
    path = Path(path)
    readers: Sequence[Callable[[], Sample]]
    try:
        readers = _folder(path) if path.is_dir() else _file(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"Cannot read inputs from {quoted(path)}: {reason}.") from error
    return Samples(f"{_count(len(readers), 'sample')} of {quoted(path)}", readers)


def _folder(path: Path) -> list[Callable[[], Sample]]:
    files = [file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES and file.is_file()]
    if not files:
        raise ArgumentError(f"The folder {quoted(path)} holds no .npz or .json file: save one per sample there.")
    return [partial(_one_sample, file) for file in sorted(files, key=_natural)]


def _natural(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sorts numbers in names by size, and equal ones by how they are written."""
    parts = re.split("([0-9]+)", path.name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts], path.name


def _one_sample(path: Path) -> Sample:
    readers = _file(path)
    if len(readers) != 1:
        raise ArgumentError(
            f"{quoted(path)} holds {len(readers)} samples, but files of a folder hold one each: name the file itself."
        )
    return readers[0]()


def _file(path: Path) -> list[Callable[[], Sample]]:
    if not path.exists():
        raise ArgumentError(f"Cannot read inputs from {quoted(path)}: there is no such file.")
    if not path.is_file():
        raise ArgumentError(f"Cannot read inputs from {quoted(path)}: it is neither a file nor a folder.")
    with path.open("rb") as stream:
        start = stream.read(8)
    if start.startswith(np.lib.format.MAGIC_PREFIX):
        text = f"{quoted(path)} holds one array without a name: save inputs with numpy.savez(path, name=array)."
        raise ArgumentError(text)
    if start.startswith(ARCHIVE_START) or path.suffix.lower() == ".npz":
        return [partial(read_npz, path)]
    return [partial(read_json, path, span) for span in json_samples(path)]


def random_samples(
    model: ModelProto, count: int = 1, *, seed: int = 0, dims: Mapping[str, int] | None = None
) -> Samples:
    """Made-up samples that the model accepts: the first is ``random_inputs(model, seed=seed, dims=dims)``.

    Args:
        model: its weights may be missing.
        count: at least 1.
        seed: non-negative; each sample depends on it and on its own number alone.
        dims: sizes of named dimensions.

    Raises:
        ArgumentError: ``count`` or ``seed`` is too small. Reading a sample raises what random_inputs raises.
    """
    if count < 1:
        raise ArgumentError(f"The number of samples must be at least 1, but is {count}.")
    if seed < 0:
        raise ArgumentError(f"The seed must not be negative, but is {seed}.")
    maker = cache(partial(input_maker, model, dims))  # the model is looked at once, when the first sample is read

    def made(index: int) -> Sample:
        return maker().make(_seed(seed, index))

    readers = [partial(made, index) for index in range(count)]
    return Samples(
        "made-up inputs" + (f" (seed {seed})" if count == 1 else f" ({count} samples, seed {seed})"),
        readers,
        made_up=True,
    )


def _seed(seed: int, index: int) -> int:
    """The sample's own seed; the first sample has the given one."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
