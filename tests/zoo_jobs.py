"""What workers are told to do in tests: they import it by name."""

import ctypes
import os
import signal
import time

from onnxamp._batch.job import FolderOptions, Job, JobResult, run_job
from onnxamp._model.staging import staging


def square_or_die(item: int | str) -> int:
    """A number squared; words say how to die."""
    if item == "segfault":
        ctypes.string_at(0)
    elif item == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif item == "left":
        os._exit(3)
    return int(item) ** 2


def slow(item: float) -> float:
    time.sleep(item)
    return item


def process(_: object) -> tuple[int, str]:
    return os.getpid(), os.environ["ONNXAMP_THREADS"]


def run_or_die(options: FolderOptions, job: Job) -> JobResult:
    """The job; models of some names crash half way through their writing."""
    if job.name.startswith(("crash", "killed")):
        with staging(job.target) as stage:
            (stage.data / f"{job.target.name}.data").write_bytes(b"half")
            stage.publish([f"{job.target.name}.data"])
            square_or_die("segfault" if job.name.startswith("crash") else "killed")
    return run_job(options, job)
