"""Fingerprints of what the measurements of a tuning depend on."""

from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._runtime.engines import Engine
from onnxamp._runtime.fingerprints import model_print, samples_print, versions
from onnxamp._runtime.samples import Samples
from onnxamp._state.state import Facts, fingerprint
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.space import SearchSpace


def given_prints(model: Model, search: Search, samples: Samples) -> Facts:
    """What they depend on, besides the options."""
    return {
        "the model": model_print(model),
        "the inputs": samples_print(samples),
        "the metric": fingerprint(str(search.metric), search.accept.print if search.accept else ""),
        "the version of onnxamp or ONNX Runtime": versions(),
    }


def options_print(changed: str, space: SearchSpace, options: Options, engine: Engine) -> str:
    """The fingerprint of what the options make of the model; ``changed`` is that of its graph, "" for its own."""
    units = (f"{unit.key} {unit.op} {unit.ports}" for unit in (*space.tunable, *space.followers))
    arithmetic = engine.arithmetic.name if engine.arithmetic else ""
    rounding = ["compensated"] * options.compensates
    return fingerprint(options.low.name, arithmetic, changed, *units, *rounding)
