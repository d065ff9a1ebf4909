"""Progress where standard error is no terminal."""

from contextlib import nullcontext
from functools import partial

import pytest

from onnxamp._fleet.outcome import FolderProgress, ModelOutcome
from onnxamp._report import progress
from onnxamp._report.progress import progress_bar, progress_lines


def test_a_line_now_and_then() -> None:
    written: list[str] = []
    told = progress_lines(written.append, every=0)
    told("measuring: sample 1 of 2", 1, 4)
    told("un\x1b[31mknown", 0, 0)
    assert [line.rpartition(" (")[0] for line in written] == ["measuring: sample 1 of 2, 25 %", "un\\x1b[31mknown"]
    assert all(line.endswith(" s)\n") for line in written)


def test_what_takes_little_time_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as told:
        told("measuring", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_between_two_models_of_a_folder_no_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(progress, "_shown", partial(nullcontext, lambda *step: written.append(step[0])))
    with progress_bar() as told:
        told(FolderProgress(1, 3, ("a/one", "two"), None))
        told(FolderProgress(2, 3, (), ModelOutcome("two")))
    assert written == ["converting: one, two", "converting"]


def test_forced_colors_draw_no_bar_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as told:
        told("measuring", 1, 2)
    assert capsys.readouterr() == ("", "")
