"""Does ONNX Runtime load a model file? Asked in a process of its own.

Loading has two steps. The first resolves the graph: names, types, shapes, alike on every provider. The second looks for
kernels, which only the provider that the model is meant for has to have.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._model.external_data import external_tensor
from onnxamp._model.model import Model
from onnxamp._model.protos import stored_bytes
from onnxamp._paths.paths import is_remote
from onnxamp._runtime.child import Child
from onnxamp._runtime.session import Provider, provider_options
from onnxamp._runtime.shell import take_weights
from onnxamp._runtime.starting import reason
from onnxamp._workers.folders import temporary_folder
from onnxamp._workers.signals import at_end
from onnxamp._workers.threads import Once

_LARGE: Final = 16 << 20
"""Bytes from which on a file is large."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading showed: ``by`` names the runtime, and ``fault`` says in a clause why it did not work ("": it did).

    Where nothing could be asked, ``by`` is "". ``does`` is what was asked of it: to "load" a model, or to "build" one.
    """

    by: str = ""
    fault: str = ""
    does: str = "load"

    def where(self, provider: Provider | None) -> str:
        """``by`` with the provider, as reports name it."""
        return f"{self.by} on {provider.upper()}" if self.by and provider else self.by


@dataclass(slots=True)
class Loader:
    """A process that loads models."""

    _child: Child = field(default_factory=lambda: Child("onnxamp._runtime.load_server"))

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self._child.start()

    def load(self, path: Path, provider: Provider | None) -> Loaded:
        """Load a file.

        Args:
            path: the file, whose external data are known to be where they may be.
            provider: where all nodes must find kernels; None to resolve the graph alone.
        """
        providers = None if provider is None else provider_options(provider)
        where = str(path.absolute())
        try:
            found = self._child.ask({"path": where, "providers": providers})
        except OSError:  # this system starts no processes
            return Loaded()
        if found is None:
            return Loaded("ONNX Runtime", f"the process that loads it {self._child.ended}")
        fault = found["fault"].partition(f"{where} failed:")[2] or found["fault"]
        return Loaded(found["by"], reason(fault))

    def end(self) -> None:
        """End the process, if there is one."""
        self._child.end()


def load_file(model: Model, provider: Provider | None, *, in_text: bool = False) -> Loaded:
    """:meth:`Loader.load` the file of a model; one in text is loaded as the binary file that it stands for.

    To resolve the graph of a large model, its weights are not read. Nor are those of one behind a URL, of which the
    graph alone is resolved.
    """
    assert model.path is not None
    is_here = not is_remote(model.path)
    if not in_text and is_here and (provider is not None or model.path.stat().st_size < _LARGE):
        return the_loader().load(model.path, provider)
    with temporary_folder() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes((model.proto if in_text else _without_weights(model)).SerializeToString())
        return the_loader().load(path, provider if is_here else None)


def _without_weights(model: Model) -> ModelProto:
    """The model with its weights declared to be in a file that there is not."""
    shell = take_weights(model.proto, model.folder, keep=0)
    for tensor in shell.model.graph.initializer:
        if tensor.name in shell.weights:
            tensor.MergeFrom(
                external_tensor("nowhere", 0, stored_bytes(shell.weights[tensor.name]))
            )
    return shell.model


@Once
def the_loader() -> Loader:
    """The loader of this process: what one import costs serves all models."""
    loader = Loader()
    at_end(loader.end)
    return loader
