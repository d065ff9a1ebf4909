"""The headroom of a model's values before it is converted, for ``inspect``."""

from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import graph_of
from onnxamp._job import Validation
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.rooms import rooms_of
from onnxamp._numerics.unseen.stressed import Room
from onnxamp._options.options import Options
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import RunOptions


def headroom_of(model: Model, options: Options, run: RunOptions) -> tuple[Room, ...]:
    """Return the values with the least headroom, by proof and, if there are samples, by runs.

    Args:
        model: the original.
        options: of its conversion: the type, and the ranges of inputs.
        run: the samples, on which the model runs, and the steps that make them hard; without any, nothing runs.

    Raises:
        ArgumentError: a sample does not fit the model.
    """
    low = options.low
    if not low.is_narrow:
        return ()
    ranges = options.input_ranges
    if run.samples is None:
        bounds = model.ask(graph_of).ask(find_bounds, low, ranges)
        return rooms_of(bounds, bounds.at_risk)
    from onnxamp._numerics.unseen.stress import Stress  # noqa: PLC0415 - loads what runs models

    samples = requested_samples(run, model, ranges=dict(ranges))
    return Stress(low, Validation().stress, ranges).of(model, model, samples).rooms
