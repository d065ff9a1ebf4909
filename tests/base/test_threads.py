"""Threads that convert at the same time share a process, and leave it as it was."""

import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path

import onnx
import pytest
from graphs import CASES
from graphs.case import parse

from onnxamp import OnnxAmpError, convert_file, convert_model
from onnxamp._base.public import no_collections
from onnxamp._base.threads import Once, beside
from onnxamp._runtime.child import Child

THREADS = 8


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that take turns as often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(action: Callable[[int], object], count: int = THREADS) -> list[object]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(action, range(count)))


def state_of_the_process() -> tuple[object, ...]:
    """What threads share, and a conversion may not leave otherwise than it was."""
    return gc.isenabled(), dict(os.environ), Path.cwd(), list(warnings.filters), sys.stdout, sys.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("switching")
def test_pauses_in_threads_leave_the_collector_enabled() -> None:
    def pause(_: int) -> None:
        for _ in range(2000):
            with no_collections(), no_collections():
                pass

    for _ in range(5):
        together(pause)
        assert gc.isenabled()


def test_a_pause_that_begins_in_another_one_and_outlasts_it_leaves_the_collector_enabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other pause ends right behind the question whether the collector is enabled."""
    asked = gc.isenabled
    with ExitStack() as first:
        first.enter_context(no_collections())

        def ending() -> bool:
            answer = asked()
            first.close()
            return answer

        monkeypatch.setattr(gc, "isenabled", ending)
        with no_collections():
            pass
    assert asked()


def test_a_pause_leaves_a_collector_disabled_that_was() -> None:
    gc.disable()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_pause_creates_counts_as_old() -> None:
    """Otherwise, the collection after the pause would visit all of it."""
    with no_collections():
        made = [[number] for number in range(5000)]
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)
    assert gc.get_freeze_count() == 0


def test_a_pause_thaws_nothing() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with no_collections():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("switching")
def test_conversions_in_threads_are_those_of_one_thread() -> None:
    models = [case.build() for case in list(CASES.values())[::4]]

    def convert(model: onnx.ModelProto) -> bytes:
        try:
            return convert_model(model).SerializeToString(deterministic=True)
        except OnnxAmpError as error:
            return str(error).encode()

    with warnings.catch_warnings(action="ignore"):
        before, wanted = state_of_the_process(), [convert(model) for model in models]
        assert together(lambda thread: [convert(model) for model in models[thread:] + models[:thread]]) == [
            wanted[thread:] + wanted[:thread] for thread in range(THREADS)
        ]
        assert state_of_the_process() == before


@pytest.mark.slow
def test_files_that_threads_write_are_those_of_one_thread(tmp_path: Path) -> None:
    """Each is loaded by the one process that loads files."""
    texts = [f"(float[{size}] x) => (float[{size}] y) {{ h = Neg (x) y = Relu (h) }}" for size in range(2, 10)]
    for number, text in enumerate(texts):
        onnx.save(parse(text), tmp_path / f"{number}.onnx")

    def convert(number: int) -> bytes:
        target = tmp_path / f"out{number}.onnx"
        convert_file(tmp_path / f"{number}.onnx", target, validate=False)
        return target.read_bytes()

    before = state_of_the_process()
    wanted = [convert(number) for number in range(THREADS)]
    for _ in range(3):
        assert together(convert) == wanted
    assert state_of_the_process() == before


@pytest.mark.usefixtures("switching")
def test_each_thread_gets_the_answer_to_its_own_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo.py").write_text(
        "from onnxamp._runtime.servers import answer_with\n"
        "def serve(): answer_with(lambda: lambda **question: question)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    child = Child("echo")

    def ask(thread: int) -> list[object]:
        return [child.ask({"number": [thread, number]}) for number in range(50)]

    try:
        assert together(ask) == [[{"number": [thread, number]} for number in range(50)] for thread in range(THREADS)]
    finally:
        child.end()


def test_what_is_there_once_is_made_once() -> None:
    made, barrier = list[int](), threading.Barrier(THREADS)

    @Once
    def make() -> list[int]:
        made.append(threading.get_ident())
        threading.Event().wait(0.05)
        return made

    def asked(_: int) -> int:
        barrier.wait()
        return id(make())

    assert set(together(asked)) == {id(made)}
    assert len(made) == 1


def test_what_runs_beside_returns_its_result_or_error_and_knows_the_context():
    variable = ContextVar("variable", default=0)
    variable.set(3)
    assert beside(variable.get)() == 3
    waits = beside(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            waits()
