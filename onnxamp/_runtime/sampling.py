"""The samples that a function or a command is to take."""

from collections.abc import Mapping
from os import PathLike

from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model, ModelSource
from onnxamp._runtime.draws import suited, usual_count
from onnxamp._runtime.engines import Executable, on_cpu
from onnxamp._runtime.samples import (
    Samples,
    SamplesLike,
    draw_of,
    drawn,
    given_samples,
    load_samples,
)


def as_samples(
    samples: SamplesLike | None,
    model: ModelSource,
    *,
    count: int | None = 1,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    reference: Executable | None = None,
    engines: tuple[str | None, ...] = (),
) -> Samples:
    """Samples from whatever a public function was given; at least one.

    Args:
        samples: Samples, a path, a Ray Dataset, a dict of arrays, or an iterable of dicts, tuples or arrays, which must
            have an end. Tensors with a method ``numpy`` are arrays. None for random samples of ``model``, which all
            other arguments are about.
        model, seed, dims: as for :func:`onnxamp.random_samples`. If it does not run with the usual sizes, others take
            their place.
        count: how many; None for as many as a verdict takes.
        reference: what results are compared with, which keeps its outputs of the first sample; None for the model.
        engines: what results run on, or are meant for, where they get a verdict.

    Raises:
        ArgumentTypeError: ``samples`` is of another type.
        ArgumentError: there is no sample, or as :func:`onnxamp.load_samples` and :func:`onnxamp.random_samples`.
    """
    if samples is None:
        model = Model.of(model)
        reference = reference or on_cpu(model)
        draw = suited(draw_of(model, seed, dims), reference)
        return drawn(draw, usual_count(reference, draw, *engines) if count is None else count)
    if isinstance(samples, (str, PathLike)):
        return load_samples(samples)
    if not isinstance(samples, Samples):
        samples = given_samples(samples, model)
    if not samples.has(0):
        raise ArgumentError("There is no sample to run the model on.")
    return samples
