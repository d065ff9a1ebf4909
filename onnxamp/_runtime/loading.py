"""Ask ONNX Runtime, in a separate process, whether it loads a file, and whether it survives a run.

A session with default options may end the process, as it does for some graphs that its own optimizers break.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import TensorProto

from onnxamp._base.errors import OnnxAmpError
from onnxamp._base.paths import is_remote
from onnxamp._base.signals import at_end
from onnxamp._base.temporary import temporary_folder
from onnxamp._base.threads import Once
from onnxamp._graph.targets.optimizers import known_optimizers, suspected_optimizers
from onnxamp._model.model import Model
from onnxamp._model.protos import holds_type
from onnxamp._runtime.child import Child
from onnxamp._runtime.sessions.session import Provider, provider_options
from onnxamp._runtime.sessions.shell import take_weights
from onnxamp._runtime.sessions.starting import active_libraries, reason, save_spilled

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
                attempt = self._tried(path, None)
                return Loaded(
                    attempt.by, attempt.fault, limit="its weights were not read"
                )
            attempt = self._tried(path, session)
            if not attempt.fault or attempt.stage == _TYPES:
                return Loaded(attempt.by, attempt.fault)
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
        return Loaded(plain.by or attempt.by, attempt.fault, disabled=blamed)

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
        reply = self.ask(question)
        if reply is None:
            return _Tried(
                "ONNX Runtime", "", f"the process that loads it {self.ended}"
            )
        fault = reply["fault"].partition(f"{where} failed:")[2] or reply["fault"]
        return _Tried(reply.get("by", ""), reply.get("stage", ""), reason(fault))


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
