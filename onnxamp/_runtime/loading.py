"""Does ONNX Runtime load a model file? Asked in a process of its own: what it crashes on must not end this one.

Loading has two steps. The first resolves the graph: names, types, shapes, alike on every provider. The second looks for
kernels, which only the provider that the model is meant for has to have.

The process starts with ONNX Runtime's import, which takes longer than most models: start it early. It serves any number
of models, and ends when this process ends.
"""

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from onnx import ModelProto

from onnxamp._model.model import Model
from onnxamp._model.weights import external_tensor, stored_bytes
from onnxamp._paths import is_remote
from onnxamp._runtime.session import Provider, provider_options
from onnxamp._runtime.shell import take_weights
from onnxamp._runtime.starting import reason
from onnxamp._workers.executor import ending

_LARGE: Final = 16 << 20
"""Bytes from which on a file is large."""
_CODE: Final = "from onnxamp._runtime.load_server import serve; serve()"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading showed: ``by`` names the runtime, and ``fault`` says in a clause why it did not work ("": it did).

    Where nothing could be asked, ``by`` is "".
    """

    by: str = ""
    fault: str = ""

    def where(self, provider: Provider | None) -> str:
        """``by`` with the provider, as reports name it."""
        return f"{self.by} on {provider.upper()}" if self.by and provider else self.by


@dataclass(slots=True)
class Loader:
    """A process that loads models. The next one is started when one died."""

    _process: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        """Start the process, without waiting for it."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE], env={**os.environ, "PYTHONPATH": path}, text=True, encoding="utf-8",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def load(self, path: Path, provider: Provider | None) -> Loaded:
        """Load a file.

        Args:
            path: the file, whose external data are known to be where they may be.
            provider: where all nodes must find kernels; None to resolve the graph alone.
        """
        try:
            self.start()
            providers = None if provider is None else provider_options(provider)
            return self._asked({"path": str(path.absolute()), "providers": providers})
        except OSError:  # this system starts no processes
            return Loaded()

    def _asked(self, question: dict[str, Any]) -> Loaded:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            found = json.loads(answer)
            fault = found["fault"].partition(f"{question['path']} failed:")[2] or found["fault"]
            return Loaded(found["by"], reason(fault))
        self._process = None
        _await(process)
        return Loaded("ONNX Runtime", f"the process that loads it {ending(process.returncode)}")

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _await(process)


def load_file(model: Model, provider: Provider | None, *, in_text: bool = False) -> Loaded:
    """:meth:`Loader.load` the file of a model; one in text is loaded as the binary file that it stands for.

    To resolve the graph of a large model, its weights are not read. Nor are those of one behind a URL, of which the
    graph alone is resolved.
    """
    assert model.path is not None
    is_here = not is_remote(model.path)
    if not in_text and is_here and (provider is not None or model.path.stat().st_size < _LARGE):
        return the_loader().load(model.path, provider)
    with TemporaryDirectory(prefix="onnxamp-") as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes((model.proto if in_text else _without_weights(model)).SerializeToString())
        return the_loader().load(path, provider if is_here else None)


def _without_weights(model: Model) -> ModelProto:
    """The model with its weights declared to be in a file that there is not."""
    shell = take_weights(model.proto, model.folder, keep=0)
    for tensor in shell.model.graph.initializer:
        if tensor.name in shell.weights:
            tensor.MergeFrom(external_tensor("nowhere", 0, stored_bytes(shell.weights[tensor.name])))
    return shell.model


def _await(process: "subprocess.Popen[str]") -> None:
    """Wait for the end of a process, and close its pipes, in which a question may be left."""
    with suppress(BrokenPipeError), process:
        pass


@cache
def the_loader() -> Loader:
    """The loader of this process: what one import costs serves all models."""
    loader = Loader()
    atexit.register(loader.end)
    return loader
