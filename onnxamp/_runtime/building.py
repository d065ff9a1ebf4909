"""Ask TensorRT-RTX, in a separate process and without a GPU, whether it builds an engine from a model.

Networks are strongly typed: the types in the file decide, and TensorRT rejects types that do not agree.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import RLock, Timer
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxamp._base.errors import OnnxAmpError, RuntimeFailure
from onnxamp._base.executor import ending
from onnxamp._base.paths import is_remote
from onnxamp._base.signals import at_end
from onnxamp._base.temporary import temporary_folder
from onnxamp._base.threads import Once
from onnxamp._graph.targets.optimizers import known_optimizers, suspected_optimizers
from onnxamp._model.model import Model
from onnxamp._model.protos import (
    all_nodes,
    copied,
    holds_type,
    opset_imports,
)
from onnxamp._runtime.sessions.session import (
    Provider,
    choose_provider,
    provider_options,
)
from onnxamp._runtime.sessions.shell import take_weights
from onnxamp._runtime.sessions.starting import active_libraries, reason, save_spilled


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
                found: dict[str, Any] = json.loads(answer)
                return found
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


_SHAPE_LIKE: Final = 64
"""Elements up to which an integer input may be a shape, whose numbers TensorRT needs."""


class Refusal(NamedTuple):
    """Why no engine is built: ``node`` is the label of the node that the builder names, "" if it names none."""

    node: str
    text: str


class Built(NamedTuple):
    """The result of a build: the builder (``by``), its refusals, and the bytes of the engine."""

    by: str
    refusals: tuple[Refusal, ...]
    size: int


class EngineBuilder(Child):
    """A process that builds engines."""

    def __init__(self) -> None:
        super().__init__("onnxamp._runtime.servers", "serve_builds")

    def build(
        self,
        model: ModelProto,
        feeds: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
    ) -> Built:
        """Build an engine.

        Args:
            model: the model; refusals contain the names of its nodes.
            feeds: inputs whose shapes the engine is for, where the model leaves them open.
            seconds: how long it may take.

        Raises:
            RuntimeFailure: TensorRT-RTX is not installed, or no process can be started.
        """
        if not can_build():
            message = "Engines are built with TensorRT-RTX, which is not installed: pip install 'onnxamp[tensorrt]'."
            raise RuntimeFailure(message)
        arrays = {
            name: np.asarray(feed)
            for name, feed in (feeds or {}).items()
            if not isinstance(feed, list)
        }
        question = {
            "shapes": {name: array.shape for name, array in arrays.items()},
            "values": {
                name: array.ravel().tolist()
                for name, array in arrays.items()
                if array.dtype.kind in "iu" and array.size <= _SHAPE_LIKE
            },
        }
        with temporary_folder() as folder:
            path = save_spilled(model, folder)
            try:
                answer = self.ask({"path": str(path), **question}, seconds=seconds)
            except OSError as error:
                raise RuntimeFailure(
                    f"No process can be started to build the engine: {error}."
                ) from error
        if answer is None:
            answer = {"fault": f"the process that builds it {self.ended}"}
        if "fault" in answer:
            return Built("TensorRT-RTX", (Refusal("", answer["fault"]),), 0)
        faults = tuple(Refusal(name, refusal(text)) for name, text in answer["faults"])
        return Built(answer["by"], faults, answer["bytes"])


def can_build() -> bool:
    """Return whether TensorRT-RTX is installed."""
    return find_spec("tensorrt_rtx") is not None


def build_engine(model: Model, feeds: Mapping[str, Any] | None = None) -> Built:
    """Build an engine from a model; refusals name nodes as reports do, by label.

    A model that imports no opset of ai.onnx is built as ONNX Runtime reads it; TensorRT would assume an old one.

    Args:
        model: the model.
        feeds: inputs whose shapes the engine is for; needed where the model leaves shapes open.

    Raises:
        RuntimeFailure: TensorRT-RTX is not installed, or no process can be started.
    """
    _ = model.stock  # looks weights up that are in files
    proto = copied(model.proto)
    del proto.opset_import[:]
    proto.opset_import.extend(
        helper.make_opsetid(*entry) for entry in opset_imports(model.proto).items()
    )
    labels: dict[str, str] = {}
    within = (node for function in proto.functions for node in function.node)
    for node in all_nodes([*proto.graph.node, *within]):
        unique = f"node{len(labels)}."
        labels[unique] = node.name or next(filter(None, node.output), "")
        node.name = unique
    built = the_builder().build(proto, feeds)
    refusals = tuple(_named(found, labels) for found in built.refusals)
    return Built(built.by, refusals, built.size)


def _named(found: Refusal, labels: Mapping[str, str]) -> Refusal:
    """Return a refusal with its node's label, and without invented names in its text."""
    names = [
        name for name in (found.node, *_UNIQUE.findall(found.text)) if name in labels
    ]
    text = _UNIQUE.sub(lambda match: labels.get(match[0], match[0]), found.text)
    return Refusal(labels[names[0]] if names else "", text)


_UNIQUE: Final = re.compile(r"node\d+\.")


def refusal(text: str) -> str:
    """Return the builder's message, without codes and places in its sources."""
    lines = [line for line in text.splitlines() if line.strip()] or [
        "it does not say why"
    ]
    for line in lines:
        match = _ERROR.search(line)
        if match is not None and "Cuda Runtime" not in line:
            return match[1].rstrip(". ")
    return re.sub(r"^\[[^\]]*\] ", "", lines[0]).rstrip(". ")


_ERROR: Final = re.compile(r"Error Code \d+: [\w ]+ \((.*?)(?: In \w+ at \S+)?\)$")


@Once
def the_builder() -> EngineBuilder:
    """Return the builder of this process, which imports TensorRT once for all models."""
    builder = EngineBuilder()
    at_end(builder.end)
    return builder


_LARGE: Final = 16 << 20
"""Bytes from which on a file is large."""
OPENED: Final = 1 << 30
"""Bytes of weights up to which a session is started: it holds up to four times as much while it is."""
_CPU: Final = "cpu"
"""The provider on which a session opens a model that is meant for another one, as on every machine."""
_TYPES: Final = "graph"
"""The stage of loading in which types are checked."""
_EXPANDED: Final = "_inlfunc_"
"""The prefix of names in functions that ONNX Runtime expands in place of ops for which a provider has no kernel. Within
another function's body, it may expand them in a wrong order (ONNX Runtime 1.31.1, ReduceL2 in a SequenceMap).
"""


class Loaded(NamedTuple):
    """The result of loading.

    Attributes:
        by: the runtime; "" if there is none.
        fault: a clause about the failure; "" if there is none.
        does: its task: to "load" a model or to "build" one.
        limit: a clause about why no session was started, so that only types were checked; "" if one was.
        disabled: the graph optimizers without which a session starts; with them, it fails, or the process ends. With a
            fault, those that a search has found: no fact says what they take up, so that nothing keeps clear of it.
        original: the fault that the original has as well, so that it does not count; "" if there is none.
    """

    by: str = ""
    fault: str = ""
    does: str = "load"
    limit: str = ""
    disabled: tuple[str, ...] = ()
    original: str = ""

    def where(self, provider: Provider | None) -> str:
        """``by`` with the provider, as reports name it."""
        return f"{self.by} on {provider.upper()}" if self.by and provider else self.by


class Loader(Child):
    """A process that loads models."""

    def __init__(self) -> None:
        super().__init__("onnxamp._runtime.servers", "serve_loads")

    def load(
        self,
        path: Path,
        provider: Provider | None,
        *,
        whole: bool = True,
        excused: bool = False,
        suspects: Sequence[str] = (),
    ) -> Loaded:
        """Load a file as a session with default options does.

        If a session starts without graph optimizers alone, those to blame are searched for.

        Args:
            path: the file, whose external data were checked before.
            provider: the provider that must have kernels for all nodes; None to open it on the CPU, where kernels may
                be missing.
            whole: start a session; otherwise resolve the graph alone.
            excused: failures of the session are due to missing kernels, whatever the provider says.
            suspects: graph optimizers that may be to blame if no session starts.
        """
        session = provider or _CPU

        def opens(disabled: Sequence[str]) -> bool:
            return not self._tried(path, session, disabled=disabled).fault

        blamed = tuple[str, ...]()
        try:
            if not whole:
                found = self._tried(path, None)
                return Loaded(found.by, found.fault, limit="its weights were not read")
            found = self._tried(path, session)
            if not found.fault or found.stage == _TYPES:
                return Loaded(found.by, found.fault)
            plain = self._tried(path, session, optimize=False)
            if not plain.fault:
                # Each suspect alone comes first, then all of them.
                alone = [(suspect,) for suspect in suspects]
                together = [tuple(suspects)] if len(suspects) > 1 else []
                for names in (*alone, *together):
                    if opens(names):
                        return Loaded(plain.by, disabled=names)
                blamed = _blamed(opens)
        except OSError:  # this system starts no processes
            return Loaded()
        is_excused = excused or _EXPANDED in plain.fault
        kernels = ("kernel", "session") if is_excused else ("kernel",)
        if provider is None and plain.fault and plain.stage in kernels:
            return Loaded(plain.by, limit=plain.fault)
        return Loaded(plain.by or found.by, found.fault, disabled=blamed)

    def runs(self, model: Model, feeds: Mapping[str, Any]) -> bool:
        """Return whether ONNX Runtime runs a model on inputs, which might end the process."""
        arrays = {
            name: feed for name, feed in feeds.items() if isinstance(feed, np.ndarray)
        }
        if len(arrays) < len(feeds):
            return False
        with temporary_folder() as folder:
            inputs = folder / "inputs.npz"
            try:
                np.savez(inputs, *arrays.values())
                path = model.path
                is_other = model.in_text or bool(model.repairs)
                if path is None or is_other or is_remote(path):
                    path = save_spilled(model.proto, folder)
                question = {
                    "path": str(path.absolute()),
                    "feeds": str(inputs),
                    "names": [*arrays],
                    "libraries": active_libraries(),
                }
                answer = self.ask(question)
            except (OSError, OnnxAmpError):
                return False
        return answer is not None and not answer["fault"]

    def _tried(
        self,
        path: Path,
        provider: Provider | None,
        *,
        optimize: bool = True,
        disabled: Sequence[str] = (),
    ) -> "_Tried":
        """Return the outcome of one attempt to load a file; without a provider, only its graph is resolved.

        Raises:
            OSError: this system starts no processes.
        """
        where = str(path.absolute())
        question = {
            "path": where,
            "providers": None if provider is None else provider_options(provider),
            "libraries": active_libraries(),
            "optimize": optimize,
            "disabled": [*disabled],
        }
        found = self.ask(question)
        if found is None:
            return _Tried(
                "ONNX Runtime", "", f"the process that loads it {self.ended}"
            )
        fault = found["fault"].partition(f"{where} failed:")[2] or found["fault"]
        return _Tried(found.get("by", ""), found.get("stage", ""), reason(fault))


_MOST_BLAMED: Final = 3
"""Graph optimizers that are searched for: if more break a model together, there is something wrong with the model."""


def _blamed(opens: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return the graph optimizers without which a model opens; () if it does not open without any of those known.

    The last one of the shortest list that must not run, counted from the first, is to blame; then those before it are
    searched, without it.

    Args:
        opens: returns whether the model opens without some optimizers.

    Complexity: two attempts, and for each that is to blame a logarithm of the number of optimizers.
    """
    names = known_optimizers()
    blamed = tuple[str, ...]()
    if not opens(names):
        return ()
    while names and len(blamed) < _MOST_BLAMED:
        # The model opens without the first `most` names, and not without fewer than `least`.
        least = 1
        most = len(names)
        while least < most:
            count = (least + most) // 2
            if opens((*names[:count], *blamed)):
                most = count
            else:
                least = count + 1
        blamed = (names[most - 1], *blamed)
        names = names[: most - 1]
        if opens(blamed):
            return blamed
    return ()


class _Tried(NamedTuple):
    """The outcome of an attempt to load: the runtime, the stage that it came to, "" if the process ended, and the fault
    there.
    """

    by: str
    stage: str
    fault: str


def load_file(
    model: Model,
    provider: Provider | None,
    *,
    in_text: bool = False,
    whole: bool = True,
) -> Loaded:
    """:meth:`Loader.load` the file of a model; one in text is loaded as the binary file that it stands for.

    To resolve only the graph of a large model, its weights are not read. Nor are those of one at a URL, of which the
    graph alone is resolved.
    """
    assert model.path is not None
    is_here = not is_remote(model.path)
    whole = whole and is_here
    suspects = [*suspected_optimizers(model.proto)]
    # ONNX Runtime's CPU provider has few kernels of bfloat16, and expands ops without one into nodes that do not agree.
    excused = holds_type(model.proto, TensorProto.BFLOAT16)
    load = partial(
        the_loader().load, provider=provider, excused=excused, suspects=suspects
    )
    if not in_text and is_here and (whole or model.path.stat().st_size < _LARGE):
        return load(model.path, whole=whole)
    with temporary_folder() as folder:
        path = Path(folder, "model.onnx")
        proto = model.proto
        if not in_text:
            proto = take_weights(proto, model.folder, keep=0).elsewhere()
        path.write_bytes(proto.SerializeToString())
        return load(path, whole=whole and in_text)


@Once
def the_loader() -> Loader:
    """Return the loader of this process, which imports ONNX Runtime once for all models."""
    loader = Loader()
    at_end(loader.end)
    return loader


def begin_loading(provider: Provider | None) -> None:
    """Start the process that loads results before ONNX Runtime is loaded here, which takes as long.

    Raises:
        ArgumentError, RuntimeFailure: the provider cannot be used, which is known before a model is read.
    """
    the_loader().start()
    choose_provider(provider)
