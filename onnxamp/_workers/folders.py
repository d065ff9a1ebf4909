"""Temporary folders that go with the process, however it is told to end."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxamp._workers.signals import cleaned_up


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end of the block, with all that is in it."""
    with (
        TemporaryDirectory(prefix="onnxamp-", ignore_cleanup_errors=True) as folder,
        cleaned_up(partial(shutil.rmtree, folder, ignore_errors=True)),
    ):
        yield Path(folder)
