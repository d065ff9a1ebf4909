"""The files that a command writes: where they go, and that they replace nothing that it reads."""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import click

from onnxamp._base.errors import ArgumentError, OutputError
from onnxamp._base.identity import Identity, identity
from onnxamp._base.paths import as_path, is_remote, made_folder
from onnxamp._cli.common import Given, tell
from onnxamp._cli.options import IN_FOLDER, DataOption
from onnxamp._facts.dtypes import low_type
from onnxamp._job import failed_name
from onnxamp._model.data_files import is_data_name, referring_models
from onnxamp._model.model import Model


def output_path(
    model: "Model", given: Given, dtype: str, *, may_fail: bool = False
) -> Path:
    """Return the path of the converted model, which may replace the original only on request, and no other input.

    With ``may_fail``, a result that fails its validation gets another name, which is also checked.

    Raises:
        ArgumentError: it would replace the original without ``--in-place``, or with it, it is another file. Others as
            :func:`check_outputs`.
        OutputError: as :func:`check_outputs`.
    """
    path = model.path or Path("model.onnx")
    name = f"{path.stem}_{low_type(dtype).suffix}.onnx"
    target = path if given.in_place else path.parent / name
    if given.output is not None:
        target = file_of(given.output, name)
    if not target.suffix:
        text = f"{str(target)!r} becomes a file without a suffix: '{target}.onnx' names a model, '{target}/' a folder."
        tell([text])
    is_same = target.exists() and path.exists() and target.samefile(path)
    if is_same and not given.in_place:
        raise ArgumentError(
            f"{str(target)!r} is the model itself: choose another output, or use --in-place to replace it."
        )
    if given.in_place and not is_same:
        raise ArgumentError(
            f"--in-place replaces {str(path)!r}, but -o names {str(target)!r}: drop one of the two."
        )
    files = [file for file in model.files if not (file == path and is_same)]
    failed = failed_name(target) if may_fail else None
    outputs = [target, given.save_plan, given.html, given.state, failed]
    check_outputs(given, outputs, *files)
    return target


def file_of(output: Path, name: str) -> Path:
    """Return the file that an output of type "output" is: the path itself, or a file of this name in a folder."""
    if output.name == IN_FOLDER:
        return output.parent / name
    return output / name if output.is_dir() else output


def _given_files(given: Given) -> list[Path]:
    """Return the files other than models that the options of a command read."""
    files = list[Path]()
    for item in click.get_current_context().command.params:
        if isinstance(item, DataOption) and item.row.reads:
            value = getattr(given, item.name)
            names = value if item.row.repeats else (value,)
            files += [as_path(name) for name in names if name is not None]
    for folder in [file for file in files if not is_remote(file) and file.is_dir()]:
        files += folder.iterdir()
    # --accept FILE.py:FUNCTION
    code = getattr(getattr(given, "accept", None), "name", "").rpartition(":")[0]
    return [*files, as_path(code)] if code else files


def check_outputs(given: Given, outputs: Iterable[Path | None], *inputs: Path) -> None:
    """Check, before anything runs, that outputs can be written and replace neither inputs nor each other, and create
    their folders. Files that options read are inputs as well. A file is the same under whatever name.

    Raises:
        ArgumentError: an output is an input, another output or its data file, the data file of a model, a standard
            stream, a link that leads back to itself, or no regular file.
        OutputError: its folder is read-only, or cannot be created.
    """
    in_use = _identities([*inputs, *_given_files(given)])
    wanted = [path for path in outputs if path is not None]
    here = [path for path in wanted if not is_remote(path)]
    for path in wanted:
        name = repr(str(path))
        fault = ""
        target = next(iter(_identities([path])), None)
        if target is None:
            fault = f"{name} is a link that leads back to itself: remove it, or choose another name for the output."
        elif target in in_use:
            fault = f"{name} is already read or written by this command: choose another name for the output."
        elif path.is_dir():
            fault = f"The output {name} is a folder: name a file."
        elif path in here and _is_printed_to(path):
            fault = f"{name} receives reports and warnings: name another file."
        elif path.exists() and not path.is_file():
            fault = f"The output {name} is not a regular file: choose another name."
        if fault:
            raise ArgumentError(fault)
        in_use.add(target)
    _check_data_files([path.resolve() for path in here])
    for path in here:
        folder = made_folder(path.parent)
        if not os.access(folder, os.W_OK):
            raise OutputError(
                f"Cannot write {str(path)!r}: the folder {str(folder)!r} is read-only."
            )


def _identities(files: Iterable[Path]) -> set[Identity]:
    """Return what files are identified by, except links in a circle, which lead to none."""
    identities = set[Identity]()
    for path in files:
        with suppress(OSError):
            identities.add(identity(path))
    return identities


def _check_data_files(outputs: Sequence[Path]) -> None:
    """Check that no output replaces a data file of another one, or a data file that a model refers to.

    Raises:
        ArgumentError: one does.
    """
    for path in outputs:
        for other in outputs:
            if path.parent == other.parent and is_data_name(path.name, other.name):
                raise ArgumentError(
                    f"{str(path)!r} may be the data file of {str(other)!r}: choose another name."
                )
        if not path.exists():
            continue
        user = referring_models(path.parent, [path.name], path).get(path.name)
        if user:
            raise ArgumentError(
                f"{str(path)!r} holds weights of {str(user)!r}: choose another name for the output."
            )


def _is_printed_to(path: Path) -> bool:
    """Return whether a path leads to a standard stream, as /dev/stdout does, and FILE in "-o FILE > FILE"."""
    # The file may not exist, or the stream may be closed or no file at all.
    no_such = (OSError, ValueError, AttributeError)
    for stream in (sys.stdout, sys.stderr):
        with suppress(*no_such):
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return True
    return False
