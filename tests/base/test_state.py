"""State files: what is kept, what is cut off, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Timer

import fsspec
import pytest

from onnxamp._base.errors import ArgumentError, OutputError
from onnxamp._base.paths import as_path
from onnxamp._base.state import State, opened

FACTS = {"the model": "m", "the inputs": "i"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.jsonl"


def filled(path: Path, **values: object) -> None:
    with opened(path) as state:
        assert state is not None
        part = state.part("comparison", FACTS)
        for key, value in values.items():
            part[key] = value


def known(path: Path) -> dict[str, object]:
    with opened(path) as state:
        assert state is not None
        part = state.part("comparison", FACTS)
        return {key: part[key] for key in part}


def test_values_come_back_in_the_order_in_which_they_were_kept(path: Path) -> None:
    values = {"b": [1, 0.1, float("inf")], "a": {"x": None}, "c": "é\n"}
    filled(path, **values)
    filled(path, d=1)
    assert list(known(path).items()) == [*values.items(), ("d", 1)]


def test_parts_do_not_see_each_other(path: Path) -> None:
    filled(path, a=1)
    with opened(path) as state:
        assert state is not None
        other = state.part("check", {"the model": "another"})
        assert list(other) == []
        other["a"] = 2
    assert known(path) == {"a": 1}


@pytest.mark.parametrize("left", [0, 1, 20, 40])
def test_what_a_killed_process_left_of_a_line_is_cut_off(left: int, path: Path) -> None:
    filled(path, a=1)
    whole = path.read_bytes()
    filled(path, b="0123456789" * 10)
    path.write_bytes(path.read_bytes()[: len(whole) + left])
    assert known(path) == {"a": 1}
    assert path.read_bytes() == whole
    filled(path, c=3)
    assert known(path) == {"a": 1, "c": 3}


def test_zeros_behind_the_last_line_are_cut_off(path: Path) -> None:
    """A machine that lost its power may have left them."""
    filled(path, a=1)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(100) + b"\n")
    assert known(path) == {"a": 1}
    assert path.read_bytes() == whole


def test_a_process_that_was_killed_has_kept_everything(path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from onnxamp._base.state import opened\n"
        "with opened(Path(sys.argv[1])) as state:\n"
        "    part = state.part('comparison', {'the model': 'm', 'the inputs': 'i'})\n"
        "    for number in range(3): part[str(number)] = number\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode != 0
    assert known(path) == {"0": 0, "1": 1, "2": 2}


def test_the_error_says_what_changed_and_nothing_is_lost(path: Path) -> None:
    filled(path, a=1)
    kept = path.read_bytes()
    for facts, said in [
        ({**FACTS, "the model": "n"}, "the model changed since then"),
        ({"the model": "n", "the inputs": "j"}, "the model and the inputs changed since then"),
        ({**FACTS, "the options": "o"}, "the options changed since then"),
    ]:
        with opened(path) as state:
            assert state is not None
            with pytest.raises(ArgumentError, match=f"belongs to another comparison: {said}"):
                state.part("comparison", facts)
    assert path.read_bytes() == kept


def test_a_part_that_is_renewed_forgets(path: Path) -> None:
    filled(path, a=1)
    for expected in ([], ["b"]):
        with opened(path) as state:
            assert state is not None
            part = state.part("comparison", {"the model": "n"}, renew=True)
            assert list(part) == expected
            part["b"] = 2


def test_what_is_no_state_is_refused_or_replaced(path: Path) -> None:
    path.write_text("something else")
    with pytest.raises(ArgumentError, match="name another file"), opened(path):
        pass
    assert path.read_text() == "something else"
    with opened(path, renew=True) as state:
        assert isinstance(state, State)
    assert known(path) == {}


def test_an_empty_file_is_a_state(path: Path) -> None:
    path.touch()
    filled(path, a=1)
    assert known(path) == {"a": 1}


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Cannot write the state file"), opened(tmp_path / "no" / "state"):
        pass


@pytest.mark.skipif(os.name == "nt", reason="nothing is locked there")
def test_two_at_once_are_refused(path: Path) -> None:
    with opened(path), pytest.raises(ArgumentError, match="Another process is using the state file"), opened(path):
        pass
    filled(path, a=1)


@pytest.mark.skipif(os.name == "nt", reason="nothing is locked there")
def test_what_may_be_renewed_waits_for_a_process_that_was_left_behind(path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from onnxamp._base.state import opened\n"
        "with opened(Path(sys.argv[1])) as state:\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    state.part('comparison', {'the model': 'm', 'the inputs': 'i'})['a'] = 1\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(ArgumentError), opened(path):
            pass
        Timer(0.2, lambda: print(file=process.stdin, flush=True)).start()
        with opened(path, renew=True) as state:
            assert isinstance(state, State)
            assert dict(state.part("comparison", FACTS)) == {"a": 1}


def test_a_state_behind_a_url() -> None:
    url = as_path("memory://states/one")
    filled(url, a=1)
    filled(url, b=2)
    assert known(url) == {"a": 1, "b": 2}
    lines = fsspec.filesystem("memory").cat("/states/one").splitlines()
    assert [json.loads(line).get("key") for line in lines] == [None, None, "a", "b"]
