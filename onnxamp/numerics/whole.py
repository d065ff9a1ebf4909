"""Models run whole, each in one optimised session: what production computes, fusions included."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from onnxamp.runtime.session import Provider, make_session, run
from onnxamp.runtime.values import Feed, as_typed

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
