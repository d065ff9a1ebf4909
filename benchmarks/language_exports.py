"""Networks of random weights, as the software exports them that folders of language models come from.

PYTHON benchmarks/language_exports.py genai|javascript|prompts NAME WEIGHTS CACHE

benchmarks/language_models.py calls it with environments that have what each needs, which is not in one of them: "genai"
and "prompts" onnxruntime-genai, torch and transformers>=5; "javascript" optimum-onnx, with transformers<5.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY: Final = 2048
POSITIONS: Final = 2048
WHISPER_POSITIONS: Final = 448
"""As many tokens as Whisper has places for."""
DECODERS: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": 1,
    "initializer_range": 0.06,
}


def llama() -> Any:
    """A Llama."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODERS))


def qwen() -> Any:
    """A Qwen 3, with norms of queries and keys."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODERS))


def gemma() -> Any:
    """A Gemma 2 with soft caps, whose residual stream exceeds 65504 from the second layer on."""
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**DECODERS, sliding_window=16))
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers[1:]):
            layer.post_feedforward_layernorm.weight.fill_(0.0 if number else 60000.0)
    return model


def whisper() -> Any:
    """A Whisper that hears 30 seconds."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        encoder_layers=2,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=256,
        encoder_ffn_dim=256,
        d_model=64,
        max_target_positions=WHISPER_POSITIONS,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=VOCABULARY - 1,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.06,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=3, eos_token_id=VOCABULARY - 1, pad_token_id=1, max_length=WHISPER_POSITIONS
    )
    return model


NETWORKS: Final[dict[str, Callable[[], Any]]] = {"llama": llama, "qwen": qwen, "gemma": gemma, "whisper": whisper}


def checkpoint(name: str, home: Path) -> Path:
    """Write a network with a tokenizer that has a word for each token."""
    folder = home / "checkpoints" / name
    if (folder / "tokenizer.json").exists():
        return folder
    torch.manual_seed(0)
    NETWORKS[name]().eval().save_pretrained(folder)
    if name == "whisper":
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    special = {0: "<s>", 1: "<pad>", 2: "<unk>", VOCABULARY - 1: "</s>"}
    vocabulary = {special.get(number, f"t{number}"): number for number in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=special[2]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = dict(zip(("bos_token", "pad_token", "unk_token", "eos_token"), special.values(), strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


def for_genai(name: str, weights: str, home: Path) -> Path:
    """Export a folder for ONNX Runtime GenAI with its model builder."""
    folder = home / f"genai-{name}-{weights}"
    if not folder.exists():
        source, precision = checkpoint(name, home), {"float32": "fp32", "int4": "int4"}[weights]
        builder = ("-m", "onnxruntime_genai.models.builder", "-m", source, "-o", folder, "-p", precision, "-e", "cpu")
        command = [sys.executable, *builder, "-c", home / "cache"]
        subprocess.run([*map(str, command)], check=True)
    return folder


def for_javascript(name: str, weights: str, home: Path) -> Path:
    """Export a folder for transformers.js with Optimum; ONNX Runtime's quantizer makes weights of 4 bits."""
    folder = home / f"javascript-{name}-{weights}"
    if folder.exists():
        return folder
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # noqa: PLC0415
    from optimum.exporters.onnx import main_export  # noqa: PLC0415

    source = checkpoint(name, home)
    task = "automatic-speech-recognition" if name == "whisper" else "text-generation"
    main_export(str(source), output=folder, task=f"{task}-with-past")
    shutil.copy(source / "tokenizer.json", folder)
    (folder / "onnx").mkdir()
    wanted = {"encoder_model.onnx", "decoder_model_merged.onnx", "model.onnx"}
    for path in folder.glob("*.onnx*"):
        if path.name not in wanted:
            path.unlink()
            continue
        place = folder / "onnx" / path.name
        shutil.move(path, place)
        if weights == "int4":
            quantizer = MatMulNBitsQuantizer(str(place), block_size=32, is_symmetric=True, accuracy_level=4)
            quantizer.process()
            quantizer.model.save_model_to_file(str(place.with_name(f"{place.stem}_q4.onnx")))
            place.unlink()
    return folder


def prompts(name: str, weights: str, home: Path) -> Path:
    """Write six texts of 40 tokens that the network samples itself; of Whisper 20 tokens drawn at random."""
    path = home / f"{name}.txt"
    if path.exists():
        return path
    random = np.random.default_rng(1)
    if name == "whisper":
        texts = random.integers(3, VOCABULARY - 1, (6, 20)).tolist()
    else:
        texts = [sampled(for_genai(name, weights, home), random, 40) for _ in range(6)]
    path.write_text("".join(" ".join(f"t{token}" for token in text) + "\n" for text in texts))
    return path


def sampled(folder: Path, random: np.random.Generator, count: int) -> list[int]:
    """Tokens that a decoder samples after one at random."""
    import onnxruntime_genai as genai  # noqa: PLC0415

    model = genai.Model(str(folder))
    generator = genai.Generator(model, genai.GeneratorParams(model))
    tokens = [int(random.integers(3, VOCABULARY - 48))]
    generator.append_tokens(tokens)
    while len(tokens) < count:
        logits = np.array(generator.get_logits(), np.float64).reshape(-1)
        shares = np.exp(logits - logits.max())
        tokens.append(int(random.choice(shares.size, p=shares / shares.sum())))
        generator.append_tokens(tokens[-1:])
    return tokens


EXPORTS: Final = {"genai": for_genai, "javascript": for_javascript, "prompts": prompts}

if __name__ == "__main__":
    what, name, weights, home = sys.argv[1:]
    EXPORTS[what](name, weights, Path(home))
