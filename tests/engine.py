"""The engine's inner steps, for tests that look between them: one place that knows how they are called."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from math import sqrt
from typing import Any

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis, analyze
from onnxamp._convert.estimate import Estimate
from onnxamp._facts.devices import device_called
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import Prepared, prepare
from onnxamp._tuning.choices.space import SearchSpace, find_space
from onnxamp._tuning.errors.expected import ExpectedErrors
from onnxamp._tuning.errors.lowered import Settled


def prepared(model: ModelProto, level: str = "O2", **options: Any) -> Prepared:
    """The model made ready for a conversion."""
    return prepare(Model.of(model), Options.of(level, options))


def analysis_of(model: ModelProto, level: str = "O2", **options: Any) -> Analysis:
    """What a conversion decides."""
    return analyze(prepared(model, level, **options).graph, Options.of(level, options))


def replayed(model: ModelProto, decisions: dict[str, bool], level: str = "auto") -> Analysis:
    """What a conversion decides that repeats decisions."""
    return analyze(prepared(model, level).graph, Options.of(level), decisions)


def space_of(model: ModelProto, **options: Any) -> SearchSpace:
    """What tuning can choose among, priced for an A100."""
    asked = Options.of("auto", options)
    graph = prepare(Model.of(model), asked).graph
    return find_space(graph, asked, Estimate(graph, device_called("A100"), graph.shapes))


class Priced(ExpectedErrors):
    """Errors that a test makes up: one price for each node that computes."""

    prices: list[float]

    def predicted(self, low: AbstractSet[str]) -> float:
        """The root of the sum of prices."""
        pairs = zip(self.computing, self.prices, strict=True)
        return sqrt(sum(price for unit, price in pairs if unit.key in low))


def priced(space: SearchSpace, prices: Iterable[float]) -> ExpectedErrors:
    """Expected errors of which the prices are known."""
    errors = Priced(
        graph=space.all_low.graph,
        low=space.estimate.low,
        computing=space.tunable,
        exact=space.followers,
        samples=(),
        settled=Settled(),
    )
    vars(errors)["prices"] = list(prices)
    return errors
