"""Workers of a Ray cluster of several machines, which are processes here: what dies, what is lost, what is the same."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import zoo_jobs
from commands import MODELS
from repository import ROOT

import onnxamp
from onnxamp._base.executor import Crash, Work
from onnxamp._base.executor import run as work_on
from onnxamp._fleet.cluster import Cluster, connect
from onnxamp._fleet.outcome import FolderProgress
from onnxamp._report.formats import diff_json

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install onnxamp[ray]")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="Ray runs clusters of several machines on Unix"),
    # Ray leaves sockets and processes to the end of its own process
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A cluster of two machines with a processor each."""
    from ray.cluster_utils import Cluster as Machines

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *([before] if before else [])])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    machines.add_node(num_cpus=1)
    ray.init(machines.address, log_to_driver=False, logging_level=logging.ERROR)
    yield machines
    ray.shutdown()
    machines.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture
def cluster(machines: Any) -> Iterator[Cluster]:
    with closing(connect(machines.address, None)) as workers:
        yield workers


def doing(function: Callable[..., Any], *first: object) -> Work:
    return partial(zoo_jobs.plain, partial(function, *first))


def test_each_machine_has_a_worker(cluster: Cluster, tmp_path: Path) -> None:
    assert (cluster.count, cluster.threads) == (2, 1)
    found = dict(work_on(cluster, doing(zoo_jobs.home, str(tmp_path)), range(2)))
    assert len(set(found.values())) == 2


def test_an_item_that_kills_is_tried_elsewhere_and_fails_alone(cluster: Cluster, tmp_path: Path) -> None:
    work = doing(zoo_jobs.die_on, str(tmp_path), 2)
    assert dict(work_on(cluster, work, ["a", "bad", "c"])) == {0: "A", 1: "BAD", 2: "C"}
    work = doing(zoo_jobs.die_on, str(tmp_path), 9)
    found = dict(work_on(cluster, work, ["a", "bad-2", "c"]))
    assert isinstance(found[1], Crash)
    assert (found[0], found[1].attempts, found[2]) == ("A", 3, "C")
    assert "died, the last of 3 that tried" in str(found[1])


def test_a_lost_machine_loses_no_item(machines: Any, tmp_path: Path) -> None:
    extra = machines.add_node(num_cpus=1)

    def lose() -> None:
        while len(list(tmp_path.glob("begun-*"))) < 3:
            time.sleep(0.01)
        machines.remove_node(extra, allow_graceful=False)
        while sum(node["Alive"] for node in ray.nodes()) > 2:
            time.sleep(0.01)
        Path(tmp_path, "go").touch()

    started: list[int] = []
    thread = Thread(target=lose)
    thread.start()
    with closing(connect(machines.address, None)) as workers:
        assert workers.count == 3
        work = doing(zoo_jobs.wait_for, str(tmp_path))
        found = dict(work_on(workers, work, range(6), started=started.append))
    thread.join()
    assert found == {number: number for number in range(6)}
    assert len(started) == 7


def test_what_cannot_start_is_an_error(cluster: Cluster) -> None:
    found = dict(work_on(cluster, zoo_jobs.unmakable, [1, 2]))
    assert [str(result.error) for result in found.values()] == ["cannot be made"] * 2


def test_workers_of_one_item_each(machines: Any) -> None:
    with closing(connect(machines.address, None, once=True)) as workers:
        found = [result for _, result in work_on(workers, partial(zoo_jobs.plain, zoo_jobs.process), range(4))]
    assert len({pid for pid, _ in found}) == 4


def test_closing_ends_workers_at_work(cluster: Cluster) -> None:
    running = work_on(cluster, doing(zoo_jobs.slow), [0.0, 3600.0])
    assert next(running) == (0, 0.0)
    running.close()  # would wait for an hour
    assert dict(work_on(cluster, doing(zoo_jobs.slow), [0.0])) == {0: 0.0}


def test_there_is_no_such_cluster(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(onnxamp.RuntimeFailure, match="Cannot connect to the Ray cluster 'nowhere'"):
        connect("nowhere", None)


# --- folders ------------------------------------------------------------------------------------------------------


def facts(report: onnxamp.FolderReport) -> list[object]:
    """All that does not depend on time."""
    return [replace(row, seconds=0.0) for row in report.rows]


def contents(folder: Path) -> dict[str, bytes]:
    """Results by name, without the state."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def workers_of_ray() -> list[int]:
    """Process ids of actors."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::_Actor"):
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="asks Linux which processes there are")
def test_a_folder_is_converted_as_by_one_process_though_a_worker_is_killed(machines: Any, tmp_path: Path) -> None:
    (source := tmp_path / "in").mkdir()
    for path in MODELS[:3]:
        shutil.copy(path, source)
    (source / "broken.onnx").write_bytes(b"no model")
    killed: list[int] = []

    def told(moment: FolderProgress) -> None:
        # not when two are running: one worker may be done with all before the other has started
        if moment.running and not killed:
            killed.extend(workers_of_ray())
            for worker in killed:
                os.kill(worker, signal.SIGKILL)

    alone = onnxamp.convert_folder(source, tmp_path / "alone", jobs=1)
    shared = onnxamp.convert_folder(source, tmp_path / "shared", cluster=machines.address, told=told)
    assert killed
    assert shared.jobs == 2
    assert facts(shared) == facts(alone)
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    again = onnxamp.convert_folder(source, tmp_path / "shared", cluster=machines.address)
    assert {row.outcome for row in again.rows} == {"up to date", "failed before"}


def test_samples_are_compared_as_by_one_process(machines: Any, tmp_path: Path) -> None:
    """Of samples in files, and with a metric that no other process could import."""
    for number, sample in enumerate(onnxamp.random_samples(MODELS[0], 4)):
        np.savez(tmp_path / f"{number}.npz", **sample)
    low = onnxamp.convert_model(MODELS[0])
    wanted = onnxamp.diff_models(MODELS[0], low, tmp_path, provider="cpu")
    found = onnxamp.diff_models(MODELS[0], low, tmp_path, provider="cpu", cluster=machines.address)
    assert diff_json(found) == diff_json(wanted)

    def stop(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    steps: list[int] = []
    shared: dict[str, Any] = {"provider": "cpu", "cluster": machines.address, "state": tmp_path / "state"}
    with pytest.raises(KeyboardInterrupt):
        onnxamp.diff_models(MODELS[0], low, tmp_path, **shared, progress=stop)
    found = onnxamp.diff_models(MODELS[0], low, tmp_path, **shared, progress=lambda done, _: steps.append(done))
    assert (diff_json(found), steps) == (diff_json(wanted), [3, 4])

    def largest(reference: dict[str, Any], result: dict[str, Any]) -> float:
        return max(float(np.abs(value - result[name]).max()) for name, value in reference.items())

    several = [
        onnxamp.tune_model(MODELS[0], 1e-3, metric=largest, samples=tmp_path, provider="cpu", cluster=cluster)
        for cluster in (None, machines.address)
    ]
    assert several[0] == several[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of Ray, about itself
def test_rows_of_a_dataset_are_samples(machines: Any) -> None:
    """They are read by workers of the cluster, and for others by this process."""
    pytest.importorskip("pyarrow", reason="Ray's datasets need it: pip install ray[data]")
    samples = list(onnxamp.random_samples(MODELS[0], 4))
    dataset = ray.data.from_items([dict(sample) for sample in samples])
    low = onnxamp.convert_model(MODELS[0])
    wanted = onnxamp.diff_models(MODELS[0], low, samples, provider="cpu")
    for place in ({}, {"jobs": 2}, {"cluster": machines.address}):
        found = onnxamp.diff_models(MODELS[0], low, dataset, provider="cpu", **place)
        assert found.inputs == "4 rows of a Ray Dataset"
        assert found.outputs == wanted.outputs


def test_ctrl_c_leaves_what_is_done_and_the_cluster(machines: Any, tmp_path: Path) -> None:
    (source := tmp_path / "in").mkdir()
    for number in range(40):
        shutil.copy(MODELS[0], source / f"{number}.onnx")
    # whoever runs tests in the background ignores SIGINT, and children would, too
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program += "; from onnxamp.__main__ import main; main()"
    command = [sys.executable, "-c", program, "convert", str(source), "-o", str(tmp_path / "out")]
    command += ["--cluster", machines.address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("[1/40] "):  # a slow machine tells how far it is
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait() == 130
    assert rest.endswith("Aborted!\n")
    assert "Traceback" not in rest
    report = onnxamp.convert_folder(source, tmp_path / "out", cluster=machines.address)
    assert 0 < report.count("up to date") < 40
    assert report.count("converted") == 40 - report.count("up to date")


ALONE = """
import os, subprocess, sys
from contextlib import closing
from onnxamp._fleet.cluster import connect

with closing(connect("local", 1)) as cluster:
    address = cluster.ray.get_runtime_context().gcs_address
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    code = f"import ray; ray.init({address!r}, log_to_driver=False); print('in')"
    done = subprocess.run([sys.executable, "-c", code], env=stranger, capture_output=True, text=True, timeout=100)
    print(done.returncode != 0, "in" in done.stdout, cluster.ray.is_initialized())
"""


@pytest.mark.skipif(tuple(map(int, ray.__version__.split(".")[:2])) < (2, 52), reason="this version knows no tokens")
def test_a_cluster_of_this_machine_serves_nobody_else() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=own, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.split() == ["True", "False", "True"], done.stderr
