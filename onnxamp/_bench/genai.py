"""ONNX Runtime GenAI, which generates text with folders that are made for it."""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
from onnx import helper

from onnxamp._bench.generating import GENAI_CONFIG, Stepwise
from onnxamp._model.model import Model
from onnxamp._runtime.decoder import Decoder
from onnxamp._runtime.session import Provider
from onnxamp._runtime.values import Array, Feeds


class GenaiGenerator(Stepwise):
    """A folder of ONNX Runtime GenAI; it generates greedily, and never ends the text."""

    def __init__(
        self, path: Path, decoder: Decoder, provider: Provider, threads: int
    ) -> None:
        del decoder
        config = genai.Config(str(path.parent))
        config.clear_providers()
        if provider != "cpu":
            config.append_provider(provider)
        if threads:
            options = {"session_options": {"intra_op_num_threads": threads}}
            config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = genai.Model(config)
        self._generator: genai.Generator | None = None
        self._logits: Array = np.empty(0)
        self._sound = _sound(path.parent)
        self.runtime = f"onnxruntime-genai {version(genai.__name__)}"

    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """As :meth:`Stepwise.begin`."""
        del prompt
        length = len(tokens) + count
        params = genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        self._generator = genai.Generator(self._model, params)
        if self._sound is None:
            self._generator.append_tokens(tokens)
        else:
            inputs = genai.NamedTensors()
            inputs["audio_features"] = self._sound
            inputs["input_ids"] = np.array([tokens], np.int32)
            self._generator.set_inputs(inputs)
        return self.step()

    def step(self) -> int:
        """As :meth:`Stepwise.step`."""
        assert self._generator is not None
        if self.watched:  # runs the model, and would again after the token
            self._logits = np.array(self._generator.get_logits())
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])

    def logits(self) -> Array:
        """As :meth:`Stepwise.logits`."""
        return self._logits


def _sound(folder: Path) -> Array | None:
    """Return noise for an audio encoder, the same for all models; None if there is no such encoder."""
    config = json.loads((folder / GENAI_CONFIG).read_text(encoding="utf-8"))
    encoder = config["model"].get("encoder", {})
    name = encoder.get("inputs", {}).get("audio_features")
    if name is None:
        return None
    inputs = Model.of(folder / encoder["filename"]).proto.graph.input
    tensor = next(entry.type.tensor_type for entry in inputs if entry.name == name)
    shape = [dim.dim_value or 1 for dim in tensor.shape.dim]
    noise = np.random.default_rng(0).uniform(-1, 1, shape)
    return noise.astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
