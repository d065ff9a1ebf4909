"""Running models in a browser: sessions of onnxruntime-web on WebGPU, in a headless Chromium that this process starts
once.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from time import monotonic
from typing import Any, Final
from weakref import finalize

import numpy as np
from onnx import ModelProto

from onnxamp._errors import RuntimeFailure
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import lowest_precision
from onnxamp._model.model import find_data_files, load_model
from onnxamp._ops import read_table
from onnxamp._paths import as_path
from onnxamp._runtime.browser.server import BUNDLE, TYPES, find_web, pack, unpack
from onnxamp._runtime.starting import reason, source_of
from onnxamp._runtime.values import Array, Feed, Feeds, as_typed
from onnxamp._workers.executor import Once
from onnxamp._workers.signals import at_end

CHROMIUM: Final = "ONNXAMP_CHROMIUM"
"""The environment variable for the command that starts it: an executable, optionally with arguments."""

_PATIENCE: Final = 5.0
"""Seconds that Chromium may take to end."""
_HIGH: Final = 10
"""Numbers of files from here on are not those that Chromium expects its pipes at."""
_LAUNCH: Final = """
import os, sys
first, second, *command = sys.argv[1:]
os.dup2(int(first), 3)
os.dup2(int(second), 4)
os.execv(command[0], command)
"""
"""The process that becomes Chromium, with its debugging pipes at 3 and 4."""


def find_chromium() -> str | None:
    """Return the executable; None if there is none."""
    own = _facts()
    places = (place for place in own.get("places", ()) if Path(place).is_file())
    return next(
        filter(None, (*map(shutil.which, read_table("browser")["names"]), *places)),
        None,
    )


def _facts() -> Mapping[str, Any]:
    """Return the table's entry for this system."""
    found: Mapping[str, Any] = read_table("browser")["systems"].get(sys.platform, {})
    return found


def _command(*, is_software: bool) -> list[str]:
    """Chromium and its flags.

    Raises:
        RuntimeFailure: there is no Chromium.
    """
    if named := shlex.split(
        os.environ.get(CHROMIUM, ""), posix=sys.platform != "win32"
    ):
        command = [shutil.which(named[0]) or "", *named[1:]]
        wrong = f"{named[0]!r}, which {CHROMIUM} names, is not a program"
    else:
        command = [find_chromium() or ""]
        wrong = f"no Chromium is installed; apt-get install chromium installs it, and {CHROMIUM} may name another one"
    if not command[0]:
        raise RuntimeFailure(f"The provider 'browser' cannot be used here: {wrong}.")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium does not start as root with it
    table = read_table("browser")
    return [
        *command,
        *table["flags"],
        *(table["on_software"] if is_software else _facts().get("flags", ())),
    ]


class Chromium:
    """A running Chromium with a profile of its own, which is removed when it ends.

    It ends with this process, however that ends: Chromium ends when the other side of its debugging pipe is closed.
    """

    def __init__(self, url: str, *, is_software: bool = False) -> None:
        """Start it with a page, on the GPU unless ``is_software`` asks for its own software adapter.

        Raises:
            RuntimeFailure: there is no Chromium, or it cannot be started.
        """
        command = _command(is_software=is_software)
        self._profile = Path(mkdtemp(prefix="onnxamp-browser-"))
        self._pipe: tuple[int, ...] = ()
        command.append(f"--user-data-dir={self._profile}")
        try:
            if os.name == "posix":
                self._process = self._piped(
                    [*command, "--remote-debugging-pipe", "about:blank"]
                )
                self._show(url)
            else:
                self._process = _silent([*command, _start_page(self._profile, url)])
        except OSError as error:
            self._tidy()
            raise RuntimeFailure(
                f"Chromium ({command[0]}) cannot be started: {error.strerror}."
            ) from error

    def _piped(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start it with pipes at the file numbers that it expects."""
        import fcntl  # noqa: PLC0415 - POSIX alone

        (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
        self._pipe = (our_in, our_out)
        theirs = [
            fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH)
            for number in (their_in, their_out)
        ]
        try:
            launch = [
                sys.executable,
                "-IS",
                "-c",
                _LAUNCH,
                *map(str, theirs),
                *command,
            ]
            return _silent(launch, pass_fds=theirs, start_new_session=True)
        finally:
            for number in (their_in, their_out, *theirs):
                os.close(number)

    def _show(self, url: str) -> None:
        """Let it open a page, by a message of the DevTools protocol; one that has ended already reads none."""
        message = {"id": 1, "method": "Target.createTarget", "params": {"url": url}}
        with suppress(BrokenPipeError):
            os.write(self._pipe[1], json.dumps(message).encode() + b"\0")

    @property
    def pid(self) -> int:
        """The number of its first process."""
        return self._process.pid

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it and what it started, and remove its profile."""
        self._tidy()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE if os.name == "posix" else 0)
        with suppress(OSError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _tidy(self) -> None:
        """Close the pipes, which ends it."""
        for number in self._pipe:
            os.close(number)
        self._pipe = ()


def _start_page(profile: Path, url: str) -> str:
    """Return the address of a page that leads to another one; it is in the profile, which only this user can read."""
    page = profile / "start.html"
    page.touch(mode=0o600)
    page.write_text(
        f"<!doctype html><script>location.replace({json.dumps(url)})</script>",
        encoding="utf-8",
    )
    return page.as_uri()


def _silent(command: Sequence[str], **how: Any) -> "subprocess.Popen[bytes]":
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=nowhere, stdout=nowhere, stderr=nowhere, **how
    )


_STARTING: Final = 60.0
"""Seconds in which Chromium and its page have to start."""
_ANSWERING: Final = 600.0
"""Seconds that a question may take; the first run compiles shaders."""
_STEP: Final = 0.25
"""Seconds between checks that Chromium still runs."""
_MEMORY: Final = 4 * 10**9
"""Bytes that WebAssembly can address, which limit the size of a model."""

_CPU: Final = "CPUExecutionProvider"
_PROVIDER: Final = re.compile(r"placed on \[(\w+)\]\. Number of nodes: (\d+)")
_NODE: Final = re.compile(r"VerifyEachNodeIsAssignedToAnEp\] +(\w+) \(")
_NUMBERS: Final = re.compile(r"^.*?ERROR_CODE: \d+, ERROR_MESSAGE: ")
_DONE: Final = {"feed": "run", "time": "run", "call": "run", "start": "load"}
"""Verbs for questions about a model whose names differ."""
_ONNX_NAMES: Final = {"float32": "float", "float64": "double"}
"""Element types that ONNX calls otherwise."""


class Browser:
    """A headless Chromium with onnxruntime-web.

    Attributes:
        device: name of the device ("SwiftShader Device (Subzero)").
        is_software: whether it is the CPU.
        has_float16: whether it computes float16 (WebGPU's feature shader-f16).
        web: version of onnxruntime-web.
        version: "Chromium 156".
    """

    def __init__(self) -> None:
        """Start it.

        Raises:
            RuntimeFailure: Chromium or onnxruntime-web is missing, or there is no WebGPU.
        """
        self._numbers, self._gone, self._lock = count(), list[int](), Lock()
        facts = self._start(is_software=False)
        if "adapter" not in facts:
            self.end()
            facts = self._start(is_software=True)
        if "adapter" not in facts:
            self.end()
            raise RuntimeFailure(
                "The provider 'browser' cannot be used here: Chromium finds no adapter for WebGPU; install the GPU's"
                " driver, or a newer Chromium, which brings a software adapter."
            )
        adapter = facts["adapter"]
        told = (
            adapter["description"],
            f"{adapter['vendor']} {adapter['architecture']}".strip(),
        )
        self.device: str = next(filter(None, told), "an unnamed GPU")
        self.is_software = (
            adapter["fallback"]
            or adapter["architecture"] in read_table("browser")["software"]
        )
        self.has_float16: bool = facts["float16"]
        self.web: str = facts["version"]
        self.version = "Chromium " + next(
            iter(re.findall(r"Chrome/(\d+)", facts["agent"])), ""
        )

    def _start(self, *, is_software: bool) -> dict[str, Any]:
        """Return the page's facts about itself, without "adapter" if it finds none."""
        from onnxamp._runtime.browser.server import Server  # noqa: PLC0415 - imports http.server

        with ExitStack() as opened:
            self.server = Server(find_web())
            opened.callback(self.server.close)
            self._chromium = Chromium(self.server.url, is_software=is_software)
            opened.callback(self._chromium.end)
            facts, _ = self.ask("start", {"bundle": BUNDLE}, seconds=_STARTING)
            self.end = opened.pop_all().close
        return facts

    @property
    def pid(self) -> int:
        """The number of Chromium's first process."""
        return self._chromium.pid

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"WebGPU on {self.device}{', software' * self.is_software}, in {self.version}"

    @property
    def runtime(self) -> str:
        """The name of the engine in it."""
        return f"onnxruntime-web {self.web}"

    def ask(
        self,
        what: str,
        header: Mapping[str, Any],
        arrays: Mapping[str, Array] | None = None,
        seconds: float = _ANSWERING,
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return the page's answer to a question.

        Raises:
            RuntimeFailure: onnxruntime-web fails, or Chromium ends or takes too long.
        """
        with self._lock:
            self.server.ask(pack({"ask": what, **header}, arrays or {}))
            found, outputs = unpack(self._answer(what, seconds))
        if "error" in found:
            raise RuntimeFailure(
                f"onnxruntime-web could not {_DONE.get(what, what)} the model: {reason(_plain(found['error']))}."
            )
        return found, outputs

    def _answer(self, what: str, seconds: float) -> bytes:
        until = monotonic() + seconds
        while (answer := self.server.answer(_STEP)) is None:
            if self._chromium.ended() or self.server.lost.is_set():
                raise RuntimeFailure(
                    "Chromium ended before it answered: it may have run out of memory, or TMPDIR has too long a name."
                )
            if monotonic() > until:
                self._chromium.end()  # a late answer would be mistaken for the next one
                raise RuntimeFailure(
                    f"Chromium did not answer within {seconds:.0f} s ({what})."
                )
        return answer

    def open(self, model: ModelProto | str | PathLike[str]) -> "WebSession":
        """Return a session.

        Raises:
            RuntimeFailure: the model does not load, or not on WebGPU.
        """
        proto = model if isinstance(model, ModelProto) else load_model(as_path(model))
        lowest = lowest_precision(Graph.of(proto).types)
        if lowest == "bfloat16":
            raise RuntimeFailure(
                "onnxruntime-web does not compute bfloat16: convert with --dtype float16."
            )
        if lowest == "float16" and not self.has_float16:
            raise RuntimeFailure(
                f"{self.device} in {self.version} does not compute float16 (it lacks WebGPU's shader-f16); use a GPU"
                " that does, or --provider webgpu, which does so without one."
            )
        while self._gone:
            self.ask("release", {"number": self._gone.pop()})
        session = WebSession(self, next(self._numbers), model)
        finalize(session, self._gone.append, session.number)
        return session


@Once
def open_browser() -> Browser:
    """Return the browser of this process, which ends with it.

    Raises:
        As :class:`Browser`.
    """
    browser = Browser()
    at_end(browser.end)
    return browser


class WebSession:
    """A model in the browser.

    Attributes:
        number: its number in the page.
        assigned: nodes by provider ("WebGpuExecutionProvider"), after all fusions.
        left: nodes that the CPU runs, by op type.
    """

    def __init__(
        self, browser: Browser, number: int, model: ModelProto | str | PathLike[str]
    ) -> None:
        """As :meth:`Browser.open`."""
        self._browser = browser
        self.number = number
        with source_of(model) as source:
            files = _files(source.loads)
            names = {
                f"models/{number}/{place}": location
                for place, location in enumerate(files)
            }
            browser.server.shared |= {
                name: files[location] for name, location in names.items()
            }
            main, *data = names
            where = [{"path": names[name], "url": name} for name in data]
            try:
                facts, _ = browser.ask(
                    "load", {"number": number, "model": main, "data": where}
                )
            finally:
                for name in names:
                    del browser.server.shared[name]
        self._inputs: dict[str, str] = dict(facts["inputs"])
        self.assigned, self.left = _placed(facts["placed"])
        if not any(provider != _CPU for provider in self.assigned):
            raise RuntimeFailure(
                f"onnxruntime-web {browser.web} runs no node of the model on WebGPU, and the CPU was not requested."
            )

    def feed(self, feeds: Feeds) -> None:
        """Set the inputs of later runs, floats of any width. Inputs that the model does not have are ignored.

        Raises:
            RuntimeFailure: an input is missing, or of a type that a browser does not take.
        """
        if missing := [name for name in self._inputs if name not in feeds]:
            raise RuntimeFailure(
                f"The model in the browser needs the input {missing[0]!r}."
            )
        arrays = {
            name: _typed(name, feeds[name], kind)
            for name, kind in self._inputs.items()
        }
        self._browser.ask("feed", {"number": self.number}, arrays)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Outputs by name.

        Raises:
            RuntimeFailure: as :meth:`feed`, or the run fails.
        """
        self.feed(feeds)
        return self._browser.ask("run", {"number": self.number})[1]

    def time(self, runs: int) -> list[float]:
        """Return the seconds of each of that many runs on the last inputs, timed in the page, including reading outputs
        back.
        """
        taken: list[float] = self._browser.ask(
            "time", {"number": self.number, "count": runs}
        )[0]["taken"]
        return taken


def _files(source: bytes | str) -> dict[str, bytes | Path]:
    """Return the model, under the name "", and its data files, under the names that it gives them.

    Raises:
        RuntimeFailure: they are too large for a browser.
    """
    files: dict[str, bytes | Path] = {
        "": source if isinstance(source, bytes) else Path(source)
    }
    if isinstance(source, str):
        found = find_data_files(load_model(Path(source)), Path(source).parent)
        files |= {name: file.path for name, file in found.items()}
    size = sum(
        len(file) if isinstance(file, bytes) else file.stat().st_size
        for file in files.values()
    )
    if size > _MEMORY:
        raise RuntimeFailure(
            f"The model takes {size / 1e9:.1f} GB: a browser's WebAssembly addresses no more than 4 GB."
        )
    return files


def _typed(name: str, feed: Feed, kind: str) -> Array:
    """Return an input as the array that it has to be."""
    feed = np.asarray(feed) if isinstance(feed, np.generic) else feed
    if (kind != "string" and kind not in TYPES) or not isinstance(feed, np.ndarray):
        raise RuntimeFailure(
            f"The input {name!r} cannot be given to a browser: onnxruntime-web has no such type."
        )
    found = as_typed(feed, f"tensor({_ONNX_NAMES.get(kind, kind)})")
    assert isinstance(found, np.ndarray)
    return found


def _placed(lines: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Return nodes by provider, and those of the CPU by op type, as ONNX Runtime logs them.

    It logs each provider with the number of its nodes, followed by the nodes, unless all are on one provider.
    """
    assigned = Counter[str]()
    left = Counter[str]()
    provider = ""
    for line in lines:
        if found := _PROVIDER.search(line):
            provider = found[1]
            assigned[provider] += int(found[2])
        elif provider == _CPU and (node := _NODE.search(line)):
            left[node[1]] += 1
    return assigned, left


def _plain(text: str) -> str:
    """Return the first line of an error of onnxruntime-web, without its numbers."""
    return _NUMBERS.sub(
        "", text.strip().splitlines()[0] if text.strip() else "unknown error"
    )
