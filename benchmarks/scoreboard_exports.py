"""Export networks with random weights: runs in an environment with torch, timm, transformers, onnx and onnxscript.

python benchmarks/scoreboard_exports.py NAME FILE [NAME FILE ...]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from list_exports import Plain

WORDS, POSITIONS = 1000, 32


def image(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network of timm, with an input."""
    import timm  # noqa: PLC0415 - it needs a torchvision that fits torch, which the other networks do without

    return timm.create_model(name, pretrained=False), torch.rand(1, 3, 224, 224)


def text(config: Any, kind: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network of Transformers, with an input; its attention is written out, as most exports have it."""
    config._attn_implementation = "eager"  # Transformers has no public way
    return Plain(kind(config)), torch.randint(0, WORDS, (1, POSITIONS))


class Heard(torch.nn.Module):
    """Whisper's encoder or decoder, without a cache."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, first: torch.Tensor, heard: torch.Tensor | None = None) -> torch.Tensor:
        if heard is None:
            return self.inner(first, return_dict=False)[0]
        return self.inner(first, encoder_hidden_states=heard, use_cache=False, return_dict=False)[0]


def whisper(part: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Half of a Whisper of the size "tiny", for six seconds of sound.

    The usual deviation of its weights, 0.02, would leave activations far smaller than trained ones.
    """
    config = transformers.WhisperConfig(
        vocab_size=WORDS, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, max_source_positions=300,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
        begin_suppress_tokens=None, init_std=0.05,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.WhisperModel(config)
    if part == "encoder":
        return Heard(model.encoder), (torch.randn(1, 80, 600),)
    return Heard(model.decoder), (torch.randint(0, WORDS, (1, POSITIONS)), torch.randn(1, 300, 384))


def seen(config: Any, kind: Any, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network of Transformers that sees an image of so many pixels a side."""
    config._attn_implementation = "eager"
    return Plain(kind(config)), torch.randn(1, 3, size, size)


def calibrated(network: torch.nn.Module, sample: torch.Tensor) -> tuple[torch.nn.Module, torch.Tensor]:
    """Draw scales of batch normalizations, and measure their statistics on random inputs, as training leaves them.

    Without that, activations grow from block to block.
    """
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, 0.0, 0.2)
            module.momentum = None  # an average of all batches
    network.train()
    with torch.no_grad():
        for _ in range(4):
            network(torch.randn(4, *sample.shape[1:]))
    return network, sample


def vocoder() -> tuple[torch.nn.Module, torch.Tensor]:
    """HiFi-GAN, from a spectrogram to sound."""
    config = transformers.SpeechT5HifiGanConfig(
        upsample_initial_channel=128, normalize_before=True, initializer_range=0.1
    )
    return transformers.SpeechT5HifiGan(config), torch.randn(1, 20, 80)


Inputs = torch.Tensor | tuple[torch.Tensor, ...]

NETWORKS: dict[str, Callable[[], tuple[torch.nn.Module, Inputs]]] = {
    "resnet18": lambda: image("resnet18"),
    "vit-tiny": lambda: image("vit_tiny_patch16_224"),
    "convnext": lambda: image("convnext_atto"),
    "bert": lambda: text(
        transformers.BertConfig(vocab_size=WORDS, num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
                                intermediate_size=1024),
        transformers.BertModel,
    ),
    "gpt2": lambda: text(
        transformers.GPT2Config(vocab_size=WORDS, n_layer=4, n_embd=256, n_head=4), transformers.GPT2Model
    ),
    "llama": lambda: text(
        transformers.LlamaConfig(vocab_size=WORDS, num_hidden_layers=4, hidden_size=256, num_attention_heads=4,
                                 num_key_value_heads=2, intermediate_size=768),
        transformers.LlamaModel,
    ),
    "vit": lambda: seen(
        transformers.ViTConfig(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
                               initializer_range=0.06),
        transformers.ViTModel,
        224,
    ),
    "resnet50": lambda: calibrated(*seen(transformers.ResNetConfig(), transformers.ResNetForImageClassification, 128)),
    "whisper-encoder": lambda: whisper("encoder"),
    "whisper-decoder": lambda: whisper("decoder"),
    "hifigan": vocoder,
}  # fmt: skip

if __name__ == "__main__":
    for name, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        torch.manual_seed(0)
        network, sample = NETWORKS[name]()
        inputs = sample if isinstance(sample, tuple) else (sample,)
        torch.onnx.export(network.eval(), inputs, path, dynamo=True, external_data=False, verbose=False)
