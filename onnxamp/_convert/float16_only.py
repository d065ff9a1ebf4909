"""Models as devices run them that ignore types and compute everything in float16."""

from onnxamp._convert.convert import convert
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._options.values import Level


def as_float16(model: Model) -> Model:
    """Return a model as devices run it that ignore types: every op is float16 that can be, without float32 islands.

    Raises:
        ModelError: the model cannot be converted.
    """
    options = Options(
        Level.O3, hazards=False, target="float16-only", from_dtype="auto"
    )
    return Model(convert(model, options).embedded())
