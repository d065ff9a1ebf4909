"""Runs of the switched model, in which a mask says what is low, seen where ONNX Runtime is asked for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort
import pytest


@dataclass
class MaskRuns:
    """What happens as it happens; a run of several samples with one mask counts once."""

    sessions: int = 0
    masks: list[bytes] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    """Called before each run."""


def mask_runs(monkeypatch: pytest.MonkeyPatch, mask: str = "switches") -> MaskRuns:
    """Watch all sessions whose input ``mask`` is a list of Booleans."""
    seen = MaskRuns()
    first: list[bytes] = []

    class Session(ort.InferenceSession):
        def __init__(self, *arguments: Any, **given: Any) -> None:
            super().__init__(*arguments, **given)
            self.is_switched = any((item.name, item.type) == (mask, "tensor(bool)") for item in self.get_inputs())
            seen.sessions += self.is_switched

        def run(self, wanted: Any, feeds: Any, *rest: Any) -> list[Any]:
            if self.is_switched:
                sample = b"".join(feeds[name].tobytes() for name in sorted(feeds) if name != mask)
                first[:] = first or [sample]
                if sample == first[0]:
                    seen.before()
                    seen.masks.append(feeds[mask].tobytes())
            return super().run(wanted, feeds, *rest)

    monkeypatch.setattr(ort, "InferenceSession", Session)
    return seen
