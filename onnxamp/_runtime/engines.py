"""Ways to run a model: whole, in one optimised session, as in production; or piece by piece, emulated if asked."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from onnx import ModelProto

from onnxamp._model.model import Model
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.browser.session import WebSession, open_browser, open_web
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.device import device_name
from onnxamp._runtime.observe import Observed, observe
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.plugins import engine_called
from onnxamp._runtime.session import BROWSER, Provider, assigned_nodes, is_plugin, make_session, run
from onnxamp._runtime.side import run_together
from onnxamp._runtime.values import Feed, as_typed

if TYPE_CHECKING:
    import onnxruntime as ort

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the work that is done and all there is to do."""

_STEPS: Final = 1000
"""Steps of a part of the work."""

Outputs: TypeAlias = Mapping[str, Any]
"""Arrays by output; lists for sequences, dicts for maps, None for empty optionals."""


@dataclass(slots=True)
class WholeModel:
    """A model in one session with all fusions, which the first run loads."""

    model: ModelProto | str | PathLike[str]
    provider: Provider
    _sessions: "list[ort.InferenceSession | WebSession]" = field(default_factory=list)

    def run(self, feeds: Mapping[str, Feed]) -> dict[str, Any]:
        """Outputs by name. Feeds that the model does not take are ignored, floats are cast to the model's types.

        Raises:
            RuntimeFailure: the model does not load or run on the provider.
        """
        if not self._sessions:
            is_web = self.provider == BROWSER
            self._sessions.append(open_web(self.model) if is_web else make_session(self.model, self.provider))
        session = self._sessions[0]
        if isinstance(session, WebSession):
            return dict(session.run(feeds))
        entries = (*session.get_inputs(), *session.get_overridable_initializers())
        types = {item.name: item.type for item in entries}
        return run(session, {name: as_typed(feed, types[name]) for name, feed in feeds.items() if name in types})

    def left_to_cpu(self) -> Counter[str]:
        """By op, the nodes of the session that a plugin provider left to the CPU; nothing before a run."""
        if not self._sessions or not is_plugin(self.provider):
            return Counter()
        session = self._sessions[0]
        if isinstance(session, WebSession):
            return session.left
        return Counter(op for provider, op, _ in assigned_nodes(session) if provider == "CPU")


@dataclass(slots=True)
class OutputCache:
    """Outputs of a reference by number of the sample, as many as fit, so that it need not run again."""

    room: int = 64 << 20
    """Bytes that are left."""
    kept: dict[int, Outputs] = field(default_factory=dict)

    def keep(self, number: int, outputs: Outputs) -> None:
        """Keep the outputs of a sample if they fit."""
        size = sum(map(_bytes_of, outputs.values()))
        if outputs and number not in self.kept and size <= self.room:
            self.kept[number], self.room = outputs, self.room - size


_ENTRY: Final = 128
"""Bytes that an entry of a dict takes, about, with its key and its number."""


def _bytes_of(output: Any) -> int:
    """The memory that an output takes, about."""
    if isinstance(output, list):
        return sum(map(_bytes_of, output))
    return _ENTRY * len(output) if isinstance(output, Mapping) else int(np.asarray(output).nbytes)


@dataclass(slots=True)
class Executable:
    """A model and how it is run. What one sample takes to prepare (analysis, emulation, sessions) serves the next.

    ``emulated`` computes low precision in float32 with explicit rounding. ``whole`` takes one optimised session instead
    of pieces, except for samples with empty optionals, which sessions cannot be fed.
    """

    model: Model
    provider: Provider
    emulated: bool
    whole: bool
    budget: int = BUDGET
    origin: "Executable | None" = None
    """What the model was converted from: sizes of values that both have are taken from there."""
    arithmetic: Profile | None = None
    """The target whose float16 sums are emulated; None for float32 sums."""
    outputs: OutputCache = field(default_factory=OutputCache)
    """What it computed of numbered samples, to compare others with."""
    _observed: Observed | None = None
    _runner: Runner | None = None
    _session: WholeModel = field(init=False)

    def left_to_cpu(self) -> Counter[str]:
        """As :meth:`WholeModel.left_to_cpu`, of the model run whole."""
        return self._session.left_to_cpu()

    def __post_init__(self) -> None:
        self._session = WholeModel(self.model.path or self.model.proto, self.provider)

    def prepare(self, feeds: Mapping[str, Feed]) -> Runner:
        """What runs pieces of the model on this sample; the same object as before if the same branches are taken.

        Raises:
            As :func:`~onnxamp._runtime.observe.observe`.
        """
        observed = observe(
            self.model.proto, self.model.folder, feeds, emulated=self.emulated, provider=self._pieces_on,
            before=self._observed, like=self.origin.prepare(feeds).flow if self.origin else None,
            arithmetic=self.arithmetic,
        )  # fmt: skip
        if self._runner is None or observed is not self._observed:
            self._observed, self._runner = observed, Runner(observed.flow, self._pieces_on)
        return self._runner

    @property
    def _pieces_on(self) -> Provider:
        """Where pieces run, if any do: a browser runs none, but what it runs is analysed all the same."""
        return "cpu" if self.provider == BROWSER else self.provider

    @property
    def choices(self) -> tuple[tuple[str, bool], ...]:
        """The conditions that the last prepared sample met: others with the same are run by the same runner."""
        return self._observed.choices if self._observed is not None else ()

    def runs_whole(self, feeds: Mapping[str, Feed]) -> bool:
        """Whether the sample runs in one session."""
        return self.whole and all(feed is not None for feed in feeds.values())

    def run(self, feeds: Mapping[str, Feed], progress: Progress | None = None) -> Outputs:
        """Outputs by name.

        Raises:
            RuntimeFailure: the model does not load or run. ArgumentError: it takes an input that is not fed.
        """
        return self.run_together([feeds], progress)[0] if not self.runs_whole(feeds) else self._session.run(feeds)

    def run_sample(self, number: int, feeds: Mapping[str, Feed], progress: Progress | None = None) -> Outputs:
        """:meth:`run` of a numbered sample, which does not run again as long as its outputs fit in memory."""
        if number not in self.outputs.kept:
            found = self.run(feeds, progress)
            self.outputs.keep(number, found)
            return found
        return self.outputs.kept[number]

    def run_together(self, samples: Sequence[Mapping[str, Feed]], progress: Progress | None = None) -> list[Outputs]:
        """:meth:`run` of several samples; those that take the same branches share each large weight that is read."""
        if any(map(self.runs_whole, samples)):
            return [self.run(feeds) for feeds in samples]
        found: list[Outputs] = []
        for runner, group in groupby(samples, self.prepare):
            names = runner.flow.outputs
            sides = run_together(runner, list(group), names, self.budget, progress)
            found += ({name: side.output(name) for name in names} for side in sides)
        return found


def on_cpu(model: Model) -> Executable:
    """A model in pieces on the CPU, as references are run there."""
    return Executable(model, "cpu", emulated=True, whole=False)


def engine_name(provider: Provider, lowest: str, arithmetic: Profile | None = None) -> str:
    """What computed, as reports name it: "CUDA (device)", "CPU, emulated float16", "OpenVINO (hint dynamic) on ..."."""
    if provider == "cuda":
        return f"CUDA ({device_name()})"
    if provider == BROWSER:
        browser = open_browser()
        return f"{browser.name} with {browser.runtime}"
    if is_plugin(provider):
        return engine_called(provider).name
    whose = "" if arithmetic is None else f" of {arithmetic.name}"
    return "CPU" if lowest == "float32" else f"CPU, emulated {lowest}{whose}"


def part_of(progress: Progress | None, part: int, parts: int, together: int = 1) -> Progress | None:
    """Progress of some of several equal parts, which may differ in their number of steps."""

    def scaled(done: int, total: int) -> None:
        if progress is not None:
            progress(part * _STEPS + done * together * _STEPS // max(total, 1), parts * _STEPS)

    return None if progress is None else scaled
