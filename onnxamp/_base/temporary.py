"""Temporary files, which are removed even if a signal ends the process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from onnxamp._base.signals import cleaned_up


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder that is removed with its contents at the end of the block."""
    folder = temporary_path()
    with cleaned_up(partial(shutil.rmtree, folder, ignore_errors=True)):
        folder.mkdir(mode=0o700)
        yield folder


def temporary_path() -> Path:
    """Return an unused path for temporary files, so that its removal can be registered before it is created."""
    return Path(gettempdir()) / f"onnxamp-{os.urandom(8).hex()}"
