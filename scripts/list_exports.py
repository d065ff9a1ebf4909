"""Write tests/exports.toml: which forms of ops PyTorch's exporters write of timm's and transformers' usual models.

    python scripts/list_exports.py      in an environment with torch, onnx, onnxscript, timm and transformers

The models have random weights and few layers: their graphs alone count. A form is the op, the opset, which inputs and
outputs are present, and the attributes that are set.
"""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers

FILE = Path(__file__).resolve().parents[1] / "tests" / "exports.toml"
IMAGES = {
    "resnet18": 64, "mobilenetv3_small_100": 64, "efficientnet_b0": 64, "convnext_atto": 64,
    "vit_tiny_patch16_224": 224, "swin_tiny_patch4_window7_224": 224, "mixer_s32_224": 224, "regnetx_002": 64,
    "densenet121": 64,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "Bert": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
    "DistilBert": {"n_layers": 1, "dim": 32, "n_heads": 2, "hidden_dim": 64},
    "GPT2": {"n_layer": 1, "n_embd": 32, "n_head": 2},
    "Llama": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 64},
    "Mistral": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
                "intermediate_size": 64},
    "Qwen2": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 64},
    "Albert": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
               "embedding_size": 16},
    "Roberta": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64},
}  # fmt: skip


class Plain(torch.nn.Module):
    """A language model from token numbers to its last hidden state, without a cache."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        keywords = {"use_cache": False} if hasattr(self.inner.config, "use_cache") else {}
        return self.inner(ids, return_dict=False, **keywords)[0]


def models() -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """The models, with an input of each."""
    import timm  # noqa: PLC0415 - it needs a torchvision that fits torch, which what imports `Plain` does without

    for name, size in IMAGES.items():
        yield f"timm {name}", timm.create_model(name, pretrained=False), torch.zeros(1, 3, size, size)
    for name, sizes in SMALL.items():
        config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=64)
        config._attn_implementation = "eager"
        inner = getattr(transformers, f"{name}Model")(config)
        yield f"transformers {name}Model", Plain(inner), torch.zeros(1, 8, dtype=torch.int64)


def exports(model: torch.nn.Module, sample: torch.Tensor) -> Iterator[tuple[str, onnx.ModelProto]]:
    """What each exporter makes of a model; what one refuses is left out."""
    ways: dict[str, Callable[[], bytes]] = {
        "torch.onnx.export": lambda: _traced(model, sample),
        "torch.onnx.export, dynamo": lambda: _captured(model, sample),
    }
    for way, made in ways.items():
        try:
            yield way, onnx.load_from_string(made())
        except Exception as error:  # noqa: BLE001 - exporters raise anything
            print(f"{way}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def _traced(model: torch.nn.Module, sample: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.onnx.export(model, (sample,), file, opset_version=17, dynamo=False)
    return file.getvalue()


def _captured(model: torch.nn.Module, sample: torch.Tensor) -> bytes:
    program = torch.onnx.export(model, (sample,), dynamo=True, verbose=False)
    return bytes(program.model_proto.SerializeToString())


def forms_of(model: onnx.ModelProto) -> Iterator[tuple[str, int, str, str, str]]:
    """The forms of the nodes of a graph."""
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    for node in model.graph.node:
        if node.domain in ("", "ai.onnx"):
            ports = ("".join("x" if name else "-" for name in names) for names in (node.input, node.output))
            yield node.op_type, opset, *ports, " ".join(sorted(item.name for item in node.attribute))


def main() -> int:
    """Export, and write the file; the exit code is 0."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[tuple[str, int, str, str, str], set[str]] = {}
    for name, model, sample in models():
        for way, made in exports(model.eval(), sample):
            for form in forms_of(made):
                found.setdefault(form, set()).add(f"{name} ({way})")
    lines = [
        "# Forms of ops that exporters write. Written by scripts/list_exports.py, which explains them.",
        f'source = "torch {torch.__version__}, timm {version("timm")}, transformers {transformers.__version__}"',
    ]
    for (op, opset, inputs, outputs, attributes), by in sorted(found.items()):
        lines += [
            "", "[[forms]]", f'op = "{op}"', f"opset = {opset}", f'inputs = "{inputs}"', f'outputs = "{outputs}"',
            f'attributes = "{attributes}"', f'first = "{min(by)}"',
        ]  # fmt: skip
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
