"""The samples that a user asks for, drawn for a model."""

from collections.abc import Mapping

from onnxamp._model.model import Model
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.samples import Samples, as_samples
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.sessions.values import check_inputs


def requested_samples(
    asked: RunOptions,
    model: Model,
    target: str | None = None,
    reference: Session | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Samples:
    """Return the samples that a user asks for.

    Args:
        asked: the wishes for a run.
        model: the model that they are for.
        target: the target of the results, if they are judged.
        reference: the model to compare with, if any; it keeps its outputs of the first sample.
        ranges: the ranges of random inputs by name.

    Raises:
        ArgumentError: the samples cannot be read or do not fit the model, or it has no such dimension.
    """
    samples = as_samples(
        asked.samples,
        model,
        count=asked.count,
        seed=asked.seed,
        dims=asked.dims,
        ranges=ranges,
        reference=reference,
        engines=(target, asked.provider),
    )
    if asked.samples is not None:
        check_inputs(model.proto, samples[0])
    elif asked.dims or ranges:
        samples[0]  # names a dimension or an input that the model lacks
    return samples
