"""Export a network with random weights: runs in an environment with torch, timm, transformers, onnx and onnxscript.

python benchmarks/scoreboard_exports.py NAME FILE
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from list_exports import Plain

WORDS, POSITIONS = 1000, 32


def image(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network of timm, with an input."""
    return timm.create_model(name, pretrained=False), torch.rand(1, 3, 224, 224)


def text(config: Any, kind: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network of Transformers, with an input; its attention is written out, as most exports have it."""
    config._attn_implementation = "eager"  # Transformers has no public way
    return Plain(kind(config)), torch.randint(0, WORDS, (1, POSITIONS))


NETWORKS: dict[str, Callable[[], tuple[torch.nn.Module, torch.Tensor]]] = {
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
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    network, sample = NETWORKS[sys.argv[1]]()
    torch.onnx.export(network.eval(), (sample,), sys.argv[2], dynamo=True, external_data=False, verbose=False)
