"""Worker processes of this machine, and the loop that hands out work: what dies, what is kept, what is held back."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import zoo_jobs
from commands import CLASSIFIER

import onnxamp
from onnxamp._base.executor import Crash, Failed, Work, run, run_in_order
from onnxamp._base.place import Place
from onnxamp._base.processes import Processes
from onnxamp._base.threads import THREADS, thread_limit
from onnxamp._runtime.sessions.session import make_session

UNIX = pytest.mark.skipif(os.name == "nt", reason="signals of Unix")


@pytest.fixture
def pair() -> Iterator[Processes]:
    with closing(Processes(2, 1)) as workers:
        yield workers


def doing(function: Callable[[Any], Any]) -> Work:
    return partial(zoo_jobs.plain, function)


@pytest.mark.slow
@UNIX
@pytest.mark.usefixtures("forked")
def test_a_worker_that_dies_takes_no_other_item_with_it(pair: Processes) -> None:
    items = [1, "segfault", 2, "killed", "left", 3, 4]
    found = dict(run(pair, doing(zoo_jobs.square_or_die), items))
    crashes = {1: Crash(-signal.SIGSEGV), 3: Crash(-signal.SIGKILL), 4: Crash(3)}
    assert found == {0: 1, 2: 4, 5: 9, 6: 16} | crashes
    assert [str(found[position]).split(":")[0].rstrip(".") for position in crashes] == [
        "The worker process was ended by SIGSEGV",
        "The worker process was ended by SIGKILL",
        "The worker process ended with exit code 3",
    ]


def test_workers_are_other_processes_are_kept_and_know_their_share() -> None:
    with closing(Processes(2, 3)) as workers:
        found = [result for _, result in run(workers, doing(zoo_jobs.process), range(5))]
        found += [result for _, result in run(workers, doing(zoo_jobs.process), range(5))]
    assert {threads for _, threads in found} == {"3"}
    assert len({pid for pid, _ in found}) <= 2
    assert os.getpid() not in {pid for pid, _ in found}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_workers_of_one_item_each() -> None:
    with closing(Processes(2, 1, once=True)) as workers:
        found = [result for _, result in run(workers, doing(zoo_jobs.process), range(5))]
    assert len({pid for pid, _ in found}) == 5


@pytest.mark.usefixtures("forked")
def test_what_is_made_serves_all_items_of_a_work() -> None:
    with closing(Processes(1, 1)) as workers:
        for _ in range(2):  # the worker is the same, and makes it anew
            assert [result for _, result in run(workers, partial(zoo_jobs.counter), range(4))] == [1, 2, 3, 4]


@pytest.mark.usefixtures("forked")
def test_a_worker_remembers_what_works_leave() -> None:
    with closing(Processes(1, 1)) as workers:
        works = [partial(zoo_jobs.remembering) for _ in range(2)]
        assert [dict(run(workers, work, [0])) for work in works] == [{0: 1}, {0: 2}]


@pytest.mark.usefixtures("forked")
def test_the_same_work_is_not_begun_again() -> None:
    """But by a worker that turned to another one meanwhile."""
    with closing(Processes(1, 1)) as workers:
        work = partial(zoo_jobs.remembering)
        assert [dict(run(workers, work, [0])) for _ in range(3)] == [{0: 1}] * 3
        assert dict(run(workers, doing(zoo_jobs.square_or_die), [3])) == {0: 9}
        assert dict(run(workers, work, [0])) == {0: 2}


@pytest.mark.usefixtures("forked")
def test_every_item_is_said_to_be_started() -> None:
    started: list[int] = []
    with closing(Processes(1, 1)) as workers:
        done = [position for position, _ in run(workers, doing(zoo_jobs.square_or_die), [5, 6], started=started.append)]
    assert done == started == [0, 1]


@pytest.mark.usefixtures("forked")
def test_closing_ends_workers_at_work(pair: Processes) -> None:
    running = run(pair, doing(zoo_jobs.slow), [0.0, 3600.0])
    assert next(running) == (0, 0.0)
    running.close()  # would wait for an hour
    assert not multiprocessing.active_children() or pair.free() == 2
    assert dict(run(pair, doing(zoo_jobs.slow), [0.0])) == {0: 0.0}


@UNIX
def test_a_worker_that_ends_by_itself_is_not_interrupted(tmp_path: Path) -> None:
    """Ctrl-C may find workers so; what they do at exit (to end processes of their own) is not to be left half done."""
    told = tmp_path / "told"
    with closing(Processes(1, 1)) as workers:
        assert dict(run(workers, doing(zoo_jobs.terminated_at_exit), [str(told)])) == {0: None}
    assert told.read_text() == "ended by itself"


@UNIX
def test_a_worker_that_is_told_to_end_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where Python turns the error that unwinds its stack into another."""
    with closing(Processes(1, 1)) as workers:
        ended = dict(run(workers, doing(zoo_jobs.square_or_die), [zoo_jobs.TerminatedOnArrival()]))
    assert ended == {0: Crash(128 + signal.SIGTERM)}
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("forked")
def test_items_are_taken_when_a_worker_is_free(pair: Processes) -> None:
    taken: list[int] = []

    def items() -> Iterator[float]:
        for number in range(100):
            taken.append(number)
            yield 0.0

    running = run(pair, doing(zoo_jobs.slow), items())
    next(running)
    assert len(taken) <= 4  # those at work, the one that is done, and the next
    running.close()


@pytest.mark.usefixtures("forked")
def test_results_in_order_and_the_first_error(pair: Processes) -> None:
    assert list(run_in_order(Slow(3), lambda _: str, range(10))) == list(range(10))
    with pytest.raises(ValueError, match="first"):
        list(run_in_order(pair, doing(zoo_jobs.square_of_number), [1, "first", 2, "second"]))
    assert isinstance(dict(run(pair, doing(zoo_jobs.square_of_number), [1, "first"]))[1], Failed)


@pytest.mark.usefixtures("forked")
def test_what_cannot_be_made_is_the_error_of_each_item(pair: Processes) -> None:
    found = dict(run(pair, zoo_jobs.unmakable, [1, 2]))
    assert [str(result.error) for result in found.values()] == ["cannot be made"] * 2


def test_what_cannot_be_sent() -> None:
    with closing(Processes(1, 1)) as workers, pytest.raises(onnxamp.ArgumentError, match="importable by name"):
        next(run(workers, lambda _: str, [1]))


@pytest.mark.slow
def test_a_script_that_every_worker_would_run_again(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(f"import onnxamp\nonnxamp.convert_folder({str(CLASSIFIER.parent)!r}, 'out')\n")
    found = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    last = found.stderr.splitlines()[-1]
    assert last.startswith("onnxamp.RuntimeFailure: A worker process ended with exit code 1 as it started.")
    assert 'under `if __name__ == "__main__":`' in last


class Slow:
    """Workers that do the items that they have from the last to the first, and die of "odd" ones some times."""

    def __init__(self, count: int, deaths: int = 0, attempts: int = 1) -> None:
        self.count, self.deaths, self.attempts, self.had = count, deaths, attempts, list[tuple[int, Any]]()

    is_cluster = False

    def begin(self, work: object) -> None:
        pass

    def free(self) -> int:
        return self.count - len(self.had)

    def give(self, position: int, item: Any) -> None:
        self.had.append((position, item))

    def wait(self) -> list[tuple[int, Any]]:
        position, item = self.had.pop()
        if item == "odd" and self.deaths:
            self.deaths -= 1
            return [(position, Crash(None, "10.0.0.1"))]
        return [(position, item)]

    def stop(self) -> None:
        self.had.clear()


@pytest.mark.parametrize(("deaths", "found"), [(2, "odd"), (3, Crash(None, "10.0.0.1", 3))])
def test_an_item_gets_as_many_workers_as_it_may(deaths: int, found: object) -> None:
    assert dict(run(Slow(1, deaths, 3), lambda _: str, ["even", "odd", "even"])) == {0: "even", 1: found, 2: "even"}


def test_no_item_is_far_ahead_of_the_oldest() -> None:
    order = [position for position, _ in run(Slow(2), lambda _: str, range(8), window=4)]
    assert order == [1, 2, 3, 0, 5, 6, 7, 4]  # without a window, the first would be the last
    assert [position for position, _ in run(Slow(2), lambda _: str, range(8))][-1] == 0


def test_a_memory_error_may_pass_on_another_machine() -> None:
    items = ["even", Failed(MemoryError()), "even"]
    gave: list[int] = []
    assert dict(run(Slow(1, 0, 3), lambda _: str, items, started=gave.append)) == dict(enumerate(items))
    assert gave == [0, 1, 1, 1, 2]


def test_what_is_said_of_a_worker_of_a_cluster() -> None:
    text = "The worker process on 10.0.0.1 died, the last of 3 that tried: it crashed or ran out of memory"
    assert str(Crash(None, "10.0.0.1", 3)).startswith(text)
    assert Crash(None, "10.0.0.1").was_ended


@pytest.mark.parametrize(("wrong", "error"), [
    ({"jobs": 0}, onnxamp.ArgumentError), ({"cluster": ""}, onnxamp.ArgumentError),
    ({"jobs": 1.5}, onnxamp.ArgumentTypeError), ({"jobs": True}, onnxamp.ArgumentTypeError),
])  # fmt: skip
def test_a_place_that_is_none(wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Place(**wrong)


@pytest.mark.parametrize(("text", "limit"), [(None, 0), ("3", 3)])
def test_threads_are_limited_by_the_environment(text: str | None, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    if text:
        monkeypatch.setenv(THREADS, text)
    assert thread_limit() == limit
    assert make_session(onnx.load(CLASSIFIER)).get_session_options().intra_op_num_threads == limit
    assert make_session(onnx.load(CLASSIFIER), threads=1).get_session_options().intra_op_num_threads == 1


def test_a_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "many")
    with pytest.raises(onnxamp.ArgumentError, match="must be a number of threads, not 'many'"):
        thread_limit()


def test_a_cluster_without_ray_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(onnxamp.MissingPackageError, match=r"--cluster needs Ray, .*pip install 'onnxamp\[ray\]'"):
        onnxamp.convert_folder(CLASSIFIER.parent, tmp_path, cluster="local", validate=False)
