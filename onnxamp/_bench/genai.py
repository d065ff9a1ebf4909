"""ONNX Runtime GenAI, which generates text with the folders that are made for it."""

import json
from importlib.metadata import version
from pathlib import Path

import onnxruntime_genai as genai

from onnxamp._runtime.decoder import Decoder
from onnxamp._runtime.session import Provider
from onnxamp._runtime.values import Feeds


class GenaiGenerator:
    """A folder of ONNX Runtime GenAI; greedy, and without an end of the text."""

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
        self.runtime = f"onnxruntime-genai {version(genai.__name__)}"

    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """As :meth:`Generator.begin`."""
        del prompt
        length = len(tokens) + count
        params = genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        self._generator = genai.Generator(self._model, params)
        self._generator.append_tokens(tokens)
        return self.step()

    def step(self) -> int:
        """As :meth:`Generator.step`."""
        assert self._generator is not None
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])
