"""What to say when a model fails on its inputs."""

from contextlib import suppress
from time import monotonic
from typing import Final

from onnxamp._errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime.engines import WholeModel
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Samples

_PATIENCE: Final = 20.0
"""Seconds in which other sizes of made-up inputs are tried."""


def input_failure(text: str, error: RuntimeFailure, samples: Samples, number: int, model: Model) -> str:
    """A sentence about a model that fails on a sample: ``text``, the sample's number, the error, and advice.

    Random inputs may be the cause if a node fails, but not if the model does not even load. Then the model runs with
    other sizes, for at most 20 seconds, to name some that work.

    Raises:
        ArgumentError: the inputs are the user's, and the model had loaded: they do not fit it.
    """
    counted = f" of {samples.counted}" if samples.counted is not None else ""
    which = f" (sample {number + 1}{counted})" if samples.counted != 1 else ""
    sentence = f"{text}{which}: {error}"
    if not error.loaded:
        return sentence
    if not samples.made_up:
        raise ArgumentError(f"{sentence} Check the inputs ({samples.description}).") from error
    return f"{sentence} {_advice(samples, model)}"


def _advice(samples: Samples, model: Model) -> str:
    """Sizes with which the model does run, as options; else what else may help."""
    session, until = WholeModel(model.path or model.proto, "cpu"), monotonic() + _PATIENCE
    tried = []
    for dims, sample in samples.resized():
        with suppress(OnnxAmpError):
            session.run(check_inputs(model.proto, sample))
            options = " ".join(f"--dim {name}={size}" for name, size in dims.items())
            return f"The inputs are made up, and their sizes do not suit the model; these do: {options}"
        tried.append(", ".join(f"{name}={size}" for name, size in dims.items()))
        if monotonic() > until:
            break
    listed = f" (tried without success: {'; '.join(tried)})" if tried else ""
    return f"Real inputs (--inputs data.npz) or sizes (--dim name=N) may help{listed}."
