"""Models run on their own: whole, each in one optimised session, which is what production computes, fusions included;
or emulated, in pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from onnxamp._runtime.observe import Observed, observe
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.session import Provider, make_session, run
from onnxamp._runtime.side import run_alone
from onnxamp._runtime.values import Feed, as_typed

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(slots=True)
class Whole:
    """A model and its session, which the first run makes. Weights of a proto are loaded."""

    model: ModelProto | str | PathLike[str]
    provider: Provider
    _session: "list[ort.InferenceSession]" = field(default_factory=list)

    def run(self, feeds: Mapping[str, Feed]) -> dict[str, Any]:
        """Outputs by name. Feeds that the model does not take are left out; floats come in the model's own types.

        Raises:
            RuntimeFailure: the model does not load or run there.
        """
        if not self._session:
            self._session.append(make_session(self.model, self.provider))
        session = self._session[0]
        entries = (*session.get_inputs(), *session.get_overridable_initializers())
        kinds = {item.name: item.type for item in entries}
        return run(session, {name: as_typed(feed, kinds[name]) for name, feed in feeds.items() if name in kinds})


@dataclass(slots=True)
class Alone:
    """A model with its weights, and how it is run: emulated, which takes little memory; or as it is, whole if it can
    be. What one run found out about the model serves the next.
    """

    model: ModelProto
    provider: Provider
    emulated: bool
    _whole: Whole = field(init=False)
    _seen: Observed | None = None
    _runner: Runner | None = None

    def __post_init__(self) -> None:
        self._whole = Whole(self.model, self.provider)

    def run(self, feeds: Mapping[str, Feed]) -> dict[str, Any]:
        """Outputs by name.

        Raises:
            RuntimeFailure: the model does not load or run there.
        """
        if not self.emulated and all(feed is not None for feed in feeds.values()):
            return self._whole.run(feeds)  # sessions cannot be fed optionals that hold nothing
        seen = observe(self.model, None, feeds, emulated=self.emulated, provider=self.provider, before=self._seen)
        if self._runner is None or seen is not self._seen:
            self._seen, self._runner = seen, Runner(seen.flow, self.provider)
        side = run_alone(self._runner, feeds, seen.flow.outputs)
        return {name: side.output(name) for name in seen.flow.outputs}
