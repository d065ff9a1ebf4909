"""Software that generates text with folders that are made for it: ONNX Runtime GenAI, and transformers.js in Node or a
browser on WebGPU. Neither need be installed.
"""

import json
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import helper

from onnxamp._bench.generating import GENAI_CONFIG, Stepwise, Text
from onnxamp._errors import MissingPackageError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime.browser import open_browser
from onnxamp._runtime.browser.server import find_package
from onnxamp._runtime.decoder import Decoder
from onnxamp._runtime.session import BROWSER, Provider
from onnxamp._runtime.values import Array, Feeds

PACKAGE: Final = "@huggingface/transformers"
"""The npm package."""
_IN_NODE: Final = "dist/transformers.node.mjs"
_IN_BROWSER: Final = "dist/transformers.min.js"
_MODULE: Final = "generate.mjs"


class GenaiGenerator(Stepwise):
    """A folder of ONNX Runtime GenAI; it generates greedily, and never ends the text."""

    def __init__(
        self, path: Path, decoder: Decoder, provider: Provider, threads: int
    ) -> None:
        del decoder
        import onnxruntime_genai as genai  # noqa: PLC0415 - transformers.js does without

        config = genai.Config(str(path.parent))
        config.clear_providers()
        if provider != "cpu":
            config.append_provider(provider)
        if threads:
            options = {"session_options": {"intra_op_num_threads": threads}}
            config.overlay(json.dumps({"model": {"decoder": options}}))
        self._genai, self._model = genai, genai.Model(config)
        self._generator: Any = None
        self._logits: Array = np.empty(0)
        self._sound = _sound(path.parent)
        self.runtime = f"onnxruntime-genai {version(genai.__name__)}"

    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """As :meth:`Stepwise.begin`."""
        del prompt
        length = len(tokens) + count
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(
            max_length=length, min_length=length, do_sample=False
        )
        self._generator = self._genai.Generator(self._model, params)
        if self._sound is None:
            self._generator.append_tokens(tokens)
        else:
            inputs = self._genai.NamedTensors()
            inputs["audio_features"] = self._sound
            inputs["input_ids"] = np.array([tokens], np.int32)
            self._generator.set_inputs(inputs)
        return self.step()

    def step(self) -> int:
        """As :meth:`Stepwise.step`."""
        if self.watched:  # runs the model, and would again after the token
            self._logits = np.array(self._generator.get_logits())
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])

    def logits(self) -> Array:
        """As :meth:`Stepwise.logits`."""
        return self._logits


def _sound(folder: Path) -> Array | None:
    """Return noise for an audio encoder, the same for all models; None if there is no such encoder."""
    config = json.loads((folder / GENAI_CONFIG).read_text(encoding="utf-8"))
    encoder = config["model"].get("encoder", {})
    name = encoder.get("inputs", {}).get("audio_features")
    if name is None:
        return None
    inputs = Model.of(folder / encoder["filename"]).proto.graph.input
    tensor = next(entry.type.tensor_type for entry in inputs if entry.name == name)
    shape = [dim.dim_value or 1 for dim in tensor.shape.dim]
    noise = np.random.default_rng(0).uniform(-1, 1, shape)
    return noise.astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))


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
        loaded = self._place.ask("load", {**self._place.facts, **about})
        self.runtime = f"transformers.js {loaded['version']} in {self._place.name}"

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
            self._process.stdin.write(
                json.dumps({"name": name, "given": given}) + "\n"
            )
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeFailure("Node ended before it answered.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeFailure(answer["error"])
        self.name = answer["place"]
        self._memory = answer["memory"]
        return answer

    def memory(self) -> int | None:
        """As :meth:`_Place.memory`."""
        return self._memory


class _Page(_Place):
    """A page in its own browser."""

    def __init__(self, package: Path, folder: Path) -> None:
        own = package / "node_modules"
        beside = package.parents[1]
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
