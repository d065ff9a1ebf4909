"""Engines that generate text greedily, and the process that times one of them.

A process loads one model, and then generates after all prompts as often as requested. Its peak memory is that of the
model, with Python and the engine.
"""

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from onnxamp._optional import optional
from onnxamp._runtime.decoder import LOGITS, Decoder
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.plugins import device_memory_used
from onnxamp._runtime.servers import answer_with
from onnxamp._runtime.session import Provider, make_session, run_values
from onnxamp._runtime.starting import custom_ops
from onnxamp._runtime.values import Array, Feeds, as_typed, from_value, to_value

RUNTIME: Final = "onnxruntime"
"""ONNX Runtime, for which onnxamp feeds caches from step to step."""
GENAI: Final = "genai"
"""ONNX Runtime GenAI, which generates with folders that have its config."""
GENAI_CONFIG: Final = "genai_config.json"
"""The file that identifies a folder for ONNX Runtime GenAI."""
JAVASCRIPT: Final = "javascript"
"""transformers.js, which generates with folders of its layout, in Node and in a browser."""


class Text(NamedTuple):
    """The text that a model generated after one prompt.

    Attributes:
        tokens: the tokens.
        first: seconds to the first token.
        steps: seconds of each following token.
        nans: how many tokens were chosen from logits with NaN; 0 if logits were not watched.
    """

    tokens: list[int]
    first: float
    steps: list[float]
    nans: int


class Generator(Protocol):
    """A model on an engine. It generates one sequence at a time, greedily, and never ends the text."""

    runtime: str
    """The engine and its version."""

    def generate(
        self, prompt: Feeds, tokens: list[int], count: int, *, watched: bool
    ) -> Text:
        """Generate after a prompt; if ``watched``, look for NaN in the logits."""

    def memory(self) -> int | None:
        """Return the peak memory of the engine, in bytes; None if the system does not report it."""


class Stepwise(ABC):
    """A generator that makes one step after another in this process."""

    watched = False

    @abstractmethod
    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """Read a prompt, and return the token after it; ``count`` tokens will be generated."""

    @abstractmethod
    def step(self) -> int:
        """Return the next token."""

    @abstractmethod
    def logits(self) -> Array:
        """Return the logits that the last token was chosen from; called only if ``watched``."""

    def generate(
        self, prompt: Feeds, tokens: list[int], count: int, *, watched: bool
    ) -> Text:
        """As :meth:`Generator.generate`."""
        self.watched = watched
        found, seconds, nans = list[int](), list[float](), 0
        while len(found) < count:
            start = perf_counter()
            found.append(self.step() if found else self.begin(prompt, tokens, count))
            seconds.append(perf_counter() - start)
            nans += watched and bool(np.isnan(self.logits()).any())
        return Text(found, seconds[0], seconds[1:], nans)

    def memory(self) -> int | None:
        """As :meth:`Generator.memory`."""
        return _peak_memory()


class RuntimeGenerator(Stepwise):
    """A model in ONNX Runtime. Caches stay where a run leaves them, on the device if there is one."""

    def __init__(
        self, path: Path, decoder: Decoder, provider: Provider, threads: int
    ) -> None:
        self._session = make_session(path, provider, threads=threads, cuda_options={})
        self._decoder = decoder
        self._kinds = {item.name: item.type for item in self._session.get_inputs()}
        self._outputs = [item.name for item in self._session.get_outputs()]
        self._feeds: Feeds = {}
        self._caches: dict[str, Any] = {}
        self._logits: Array = np.empty(0)
        self._token = 0
        self.runtime = engine_on(provider).runtime

    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """As :meth:`Stepwise.begin`."""
        del tokens, count
        self._feeds, self._caches = prompt, {}
        return self._run()

    def step(self) -> int:
        """As :meth:`Stepwise.step`."""
        self._feeds = self._decoder.advanced(self._feeds, self._token)
        return self._run()

    def logits(self) -> Array:
        """As :meth:`Stepwise.logits`."""
        return self._logits

    def _run(self) -> int:
        values = dict(self._caches)
        for name in self._kinds.keys() - values.keys():
            feed = as_typed(self._feeds[name], self._kinds[name])
            values[name] = to_value(feed, self._kinds[name])
        found = run_values(self._session, values, self._outputs)
        for name, present in self._decoder.caches.items():
            if all(found[present].shape()):
                self._caches[name] = found[present]
        self._logits = from_value(found[LOGITS])[0, -1]
        self._token = int(self._logits.argmax())
        return self._token


def serve() -> None:
    """Answer questions with a :class:`_Timer`."""
    answer_with(_Timer)


class _Timer:
    """Loads one model, and times its generation."""

    def __init__(self) -> None:
        self._generator: Generator | None = None
        self._prompts: list[tuple[Feeds, list[int]]] = []
        self._before: int | None = None

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a question, or the reason of a failure under "fault"."""
        asked: Mapping[str, Callable[..., dict[str, Any]]]
        asked = {"load": self.load, "generate": self.generate, "end": self.end}
        try:
            return asked[do](**arguments)
        except Exception as error:  # noqa: BLE001 - engines may raise anything
            return {"fault": str(error) or type(error).__name__}

    def load(self, engine: str, task: str) -> dict[str, Any]:
        """Load a model with an engine; a file contains everything that it needs."""
        given: Mapping[str, Any] = pickle.loads(Path(task).read_bytes())  # noqa: S301 - the file is our own
        self._prompts, provider = given["prompts"], given["provider"]
        self._before = device_memory_used() if provider == "cuda" else None
        arguments = given["path"], given["decoder"], provider, given["threads"]
        start = perf_counter()
        with custom_ops(library=given["libraries"]):
            generator = _loaded(engine, *arguments)
        self._generator = generator
        return {"seconds": perf_counter() - start, "runtime": generator.runtime}

    def generate(self, count: int, *, watched: bool) -> dict[str, Any]:
        """Generate after all prompts, and return the seconds of first tokens and steps, the tokens, and the memory."""
        generator = self._generator
        assert generator is not None
        texts = [
            generator.generate(prompt, read, count, watched=watched)
            for prompt, read in self._prompts
        ]
        now = None if self._before is None else device_memory_used()
        taken = None if now is None or self._before is None else now - self._before
        return {
            "firsts": [text.first for text in texts],
            "steps": [seconds for text in texts for seconds in text.steps],
            "tokens": [text.tokens for text in texts],
            "nans": sum(text.nans for text in texts),
            "memory": generator.memory(),
            "device": taken,
        }

    def end(self) -> dict[str, Any]:
        """End this process, including what the engine started."""
        raise SystemExit


def _loaded(engine: str, *arguments: Any) -> Generator:
    """Return a model on the engine of this name."""
    if engine == GENAI:
        kind = optional(GENAI, "It is").GenaiGenerator
    elif engine == JAVASCRIPT:
        kind = optional(JAVASCRIPT).JavascriptGenerator
    else:
        kind = RuntimeGenerator
    generator: Generator = kind(*arguments)
    return generator


def _peak_memory() -> int | None:
    """Return the peak memory of this process, in bytes; None if the system does not report it."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    with suppress(ImportError):
        import resource  # noqa: PLC0415 - Windows has none

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    return None
