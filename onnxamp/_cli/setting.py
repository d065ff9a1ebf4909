"""The setting in which every command runs: its models are watched, and custom ops are known."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from onnxamp._base.optional import has_runtime
from onnxamp._model.sources import watched_sources
from onnxamp._runtime.sessions.starting import custom_ops


def begin(words: Mapping[str, Any]) -> None:
    """Start the process that loads results, if a command will load one.

    It imports ONNX Runtime, which takes as long as the modules of the command.
    """
    if words.get("validate") and not words["model"].is_dir() and has_runtime():
        from onnxamp._runtime.loading import the_loader  # noqa: PLC0415 - only what validates runs models

        the_loader().start()


@contextmanager
def setting(words: Mapping[str, Any]) -> Iterator[None]:
    """Watch the files that a command reads, and register the custom ops that its options name."""
    library = words.get("libraries", ())
    with watched_sources(), custom_ops(words.get("custom_ops"), library=library):
        yield
