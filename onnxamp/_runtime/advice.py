"""What to say when a model fails on its inputs."""

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._runtime.draws import other_sizes
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.random_inputs import Draw
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.sizes import listed


def input_failure(
    text: str, error: RuntimeFailure, samples: Samples, number: int, model: Model
) -> str:
    """A sentence about a model that fails on a sample: ``text``, the sample's number, the error, and advice.

    Random inputs may be the cause if a node fails, but not if the model does not even load. If other sizes were not
    tried before, the model runs with them, for at most 20 seconds, to name some that work.

    Raises:
        ArgumentError: the inputs are the user's, and the model had loaded: they do not fit it.
    """
    counted = f" of {samples.counted}" if samples.counted is not None else ""
    which = f" (sample {number + 1}{counted})" if samples.counted != 1 else ""
    sentence = f"{text}{which}: {error}"
    if not error.loaded:
        return sentence
    if samples.draw is None:
        raise ArgumentError(f"{sentence} Check the inputs ({samples.description}).") from error
    return f"{sentence} {_advice(samples.draw, model)}"


def _advice(draw: Draw, model: Model) -> str:
    """Sizes with which the model does run, as options; else what else may help."""
    found = draw
    if not draw.tried:
        session = engine_on("cpu").load(model.path or model.proto)
        found = other_sizes(
            draw, lambda other: session.run(check_inputs(model.proto, other.make(0)))
        )
    options = " ".join(
        f"--dim {name}={size}" for name, size in {**draw.sizes, **found.sizes}.items()
    )
    if options and found.sizes != draw.sizes:
        return f"The inputs are made up, and their sizes do not suit the model; these do: {options}"
    tried = (
        f" (tried without success: {'; '.join(map(listed, found.tried))})" if found.tried else ""
    )
    return f"Real inputs (--inputs data.npz) or sizes (--dim name=N) may help{tried}."
