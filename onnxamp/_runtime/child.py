"""A process that answers questions, and that may die of one."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock, Timer
from typing import Any

from onnxamp._base.executor import ending


@dataclass(slots=True)
class Child:
    """A process that answers lines of JSON by lines of JSON. The next one is started when one died.

    Threads take turns: each gets the answer to its own question.

    Attributes:
        module: the module whose function the process runs.
        function: the name of that function.
        ended: how the last process ended that did not answer a question, as a predicate; "" if each answered.
    """

    module: str
    function: str = "serve"
    ended: str = ""
    _process: "subprocess.Popen[str] | None" = None
    _turn: RLock = field(default_factory=RLock)

    def start(self) -> None:
        """Start the process, without waiting for it.

        Raises:
            OSError: this system starts no processes.
        """
        with self._turn:
            if self._process is None or self._process.poll() is not None:
                self.end()
                self._process = self._started()

    def _started(self) -> "subprocess.Popen[str]":
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        code = f"from {self.module} import {self.function}; {self.function}()"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            encoding="utf-8",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(
        self, question: dict[str, Any], *, seconds: float | None = None
    ) -> dict[str, Any] | None:
        """Return the answer to a question; None if the process ended without an answer, or was ended after that many
        seconds.

        Raises:
            OSError: this system starts no processes.
        """
        with self._turn:
            self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            timer = None if seconds is None else Timer(seconds, process.kill)
            if timer is not None:
                timer.start()
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            finally:
                if timer is not None:
                    timer.cancel()
            if answer:
                reply: dict[str, Any] = json.loads(answer)
                return reply
            self._process = None
            _await(process)
            self.ended = ending(process.returncode)
            return None

    def finish(self, question: dict[str, Any], *, seconds: float) -> None:
        """Ask a running process to end, and kill it after that many seconds."""
        with self._turn:
            try:
                if self._process is not None and self._process.poll() is None:
                    self.ask(question, seconds=seconds)
            finally:
                self.end()

    def end(self) -> None:
        """End the process, if there is one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            _await(process)


def _await(process: "subprocess.Popen[str]") -> None:
    """Wait for the end of a process, and close its pipes, in which a question may be left."""
    with suppress(BrokenPipeError), process:
        pass
