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
    """Watch all sessions whose input ``mask`` is a list of Booleans: of a model in pieces, the first that is seen."""
    seen = MaskRuns()
    first: list[tuple[list[str], list[bytes]]] = []

    class Session(ort.InferenceSession):
        def __init__(self, *arguments: Any, **given: Any) -> None:
            super().__init__(*arguments, **given)
            self.is_switched = any((item.name, item.type) == (mask, "tensor(bool)") for item in self.get_inputs())
            seen.sessions += self.is_switched

        def run_with_ort_values(self, wanted: Any, feeds: Any, *rest: Any) -> list[Any]:
            if self.is_switched:
                names = sorted(name for name in feeds if name != mask)
                arrays = [
                    feeds[name].numpy().tobytes() for name in names if feeds[name].data_type() != "tensor(string)"
                ]
                first[:] = first or [(wanted, arrays)]
                if (wanted, arrays) == first[0]:
                    seen.before()
                    seen.masks.append(feeds[mask].numpy().tobytes())
            return super().run_with_ort_values(wanted, feeds, *rest)

    monkeypatch.setattr(ort, "InferenceSession", Session)
    return seen
