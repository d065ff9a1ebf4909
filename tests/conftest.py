"""What holds for all tests."""

import os

import pytest

# Tests run beside each other: threads that wait busily for work take the cores from the others.
os.environ.setdefault("ONNXAMP_THREADS", "1")


@pytest.fixture
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as there are where nothing limits them: what writes weights uses several."""
    monkeypatch.delenv("ONNXAMP_THREADS")
