"""transformers.js, which generates text with folders that are made for it, in Node and in a browser on WebGPU."""

import json
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from onnxamp._bench.generating import Text
from onnxamp._errors import MissingPackageError, RuntimeFailure
from onnxamp._runtime.browser.server import find_package
from onnxamp._runtime.browser.session import open_browser
from onnxamp._runtime.decoder import Decoder
from onnxamp._runtime.session import BROWSER, Provider
from onnxamp._runtime.values import Feeds

PACKAGE: Final = "@huggingface/transformers"
"""The npm package."""
_IN_NODE: Final = "dist/transformers.node.mjs"
_IN_BROWSER: Final = "dist/transformers.min.js"
_MODULE: Final = "generate.mjs"


class JavascriptGenerator:
    """A folder of transformers.js, in Node on the CPU or in a browser on WebGPU."""

    def __init__(
        self, path: Path, decoder: Decoder, provider: Provider, threads: int
    ) -> None:
        del decoder
        package = find_package(PACKAGE, _IN_NODE)
        if package is None:
            raise MissingPackageError(
                f"the npm package {PACKAGE} is not installed: npm install {PACKAGE} installs it in this folder."
            )
        place = _Page if provider == BROWSER else _Node
        self._place: _Place = place(package.resolve(), path.parents[1])
        about = {"file": path.stem, "threads": threads}
        version = self._place.ask("load", {**self._place.facts, **about})["version"]
        self.runtime = f"transformers.js {version} in {self._place.name}"

    def generate(
        self, prompt: Feeds, tokens: list[int], count: int, *, watched: bool
    ) -> Text:
        """As :meth:`Generator.generate`."""
        del prompt
        question = {"tokens": tokens, "count": count, "watched": watched}
        found = self._place.ask("generate", question)
        return Text(found["tokens"], found["first"], found["steps"], found["nans"])

    def memory(self) -> int | None:
        """As :meth:`Generator.memory`."""
        return self._place.memory()


class _Place(ABC):
    """A place where JavaScript runs.

    Attributes:
        name: its name in reports.
        facts: the locations of transformers.js and the folder, and the device that it computes on.
    """

    name: str
    facts: Mapping[str, Any]

    @abstractmethod
    def ask(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function of generate.mjs, and return its answer.

        Raises:
            RuntimeFailure: the function fails.
        """

    @abstractmethod
    def memory(self) -> int | None:
        """As :meth:`Generator.memory`."""


class _Node(_Place):
    """A Node process, which ends when its input ends."""

    def __init__(self, package: Path, folder: Path) -> None:
        node = shutil.which("node")
        if node is None:
            raise MissingPackageError(
                "Node, which runs it on the CPU, is not installed."
            )
        script = Path(str(files("onnxamp._bench"))) / "node.mjs"
        pipe = subprocess.PIPE
        command = [node, str(script)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.name = "Node"
        self._memory: int | None = None
        self.facts = {
            "library": (package / _IN_NODE).as_uri(),
            "home": str(folder.parent),
            "folder": folder.name,
            "device": "cpu",
        }

    def ask(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`_Place.ask`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"name": name, "given": given}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeFailure("Node ended before it answered.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeFailure(answer["error"])
        self.name, self._memory = answer["place"], answer["memory"]
        return answer

    def memory(self) -> int | None:
        """As :meth:`_Place.memory`."""
        return self._memory


class _Page(_Place):
    """A page in its own browser."""

    def __init__(self, package: Path, folder: Path) -> None:
        own, beside = package / "node_modules", package.parents[1]
        web = next(
            home / "onnxruntime-web"
            for home in (own, beside)
            if (home / "onnxruntime-web").is_dir()
        )
        self._browser = open_browser()
        self.name = self._browser.version
        shared = self._browser.server.shared
        shared[_MODULE] = Path(str(files("onnxamp._bench"))) / _MODULE
        shared["transformers/library.js"] = package / _IN_BROWSER
        shared |= {
            f"transformers/wasm/{path.name}": path
            for path in (web / "dist").glob("*wasm*")
        }
        shared |= {
            f"folder/{path.relative_to(folder).as_posix()}": path
            for path in folder.rglob("*")
            if path.is_file()
        }
        home = self._browser.server.url.removesuffix("page.html")
        self.facts = {
            "library": f"{home}transformers/library.js",
            "wasm": f"{home}transformers/wasm/",
            "home": home,
            "folder": "folder",
            "device": "webgpu",
        }

    def ask(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`_Place.ask`."""
        question = {"module": _MODULE, "name": name, "given": given}
        return self._browser.ask("call", question)[0]

    def memory(self) -> int | None:
        """Return the memory that all processes of the browser use now; shared pages count once."""
        try:
            return sum(map(_held, _family(self._browser.pid)))
        except OSError:
            return None


def _family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants, as Linux lists them."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        for tasks in Path(f"/proc/{one}/task").glob("*/children"):
            waiting += map(int, tasks.read_text().split())


def _held(pid: int) -> int:
    """Return the bytes that a process uses, with its share of shared memory; 0 if none are reported.

    Raises:
        OSError: the system does not report it.
    """
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)))
