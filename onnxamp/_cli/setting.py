"""The setting in which every command runs: its models are watched, and custom ops are known."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from onnxamp._model.sources import watched_sources
from onnxamp._runtime.sessions.starting import custom_ops


@contextmanager
def setting(words: Mapping[str, Any]) -> Iterator[None]:
    """Watch the files that a command reads, and register the custom ops that its options name."""
    library = words.get("libraries", ())
    with watched_sources(), custom_ops(words.get("custom_ops"), library=library):
        yield
