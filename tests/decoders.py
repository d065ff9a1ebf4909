"""Small decoders in the forms in which language models are shipped."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

HEADS, KV_HEADS, HEAD = 4, 2, 16
HIDDEN, INNER, TOKENS, POSITIONS = HEADS * HEAD, 128, 96, 1088
LAYERS = 2
BLOCK = 16

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "vocab": {f"w{token}": token for token in range(TOKENS)}, "unk_token": "w0"},
}
"""Words "w0", "w1", ... are tokens."""

LETTERS = TOKENIZER | {
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
    "model": {"type": "WordLevel", "vocab": {chr(code): code - 32 for code in range(32, 127)}, "unk_token": " "},
}
"""Letters are tokens, so this one knows any text in English."""


class _Writer:
    """Collects the nodes and weights of a decoder; weights are drawn from one generator."""

    def __init__(self, *, int4: bool, scale: float) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self.int4 = int4
        self.scale = scale
        self._generator = np.random.default_rng(7)

    def node(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        """Add a node; return its first output."""
        self.nodes.append(helper.make_node(op, inputs, outputs, outputs[0], domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str, array: np.ndarray) -> str:
        """Add a weight; return its name."""
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def drawn(self, name: str, *shape: int, scale: float) -> str:
        """Add a float weight with normally distributed numbers."""
        return self.weight(name, (self._generator.standard_normal(shape) * scale).astype(np.float32))

    def project(self, source: str, name: str, rows: int, columns: int) -> str:
        """Multiply by a matrix, of float32 or of 4 bits in blocks."""
        if not self.int4:
            matrix = self.drawn(f"{name}.weight", rows, columns, scale=self.scale / np.sqrt(rows))
            return self.node("MatMul", [source, matrix], [f"{name}/out"])
        blocks = rows // BLOCK
        packed = self._generator.integers(0, 256, (columns, blocks, BLOCK // 2)).astype(np.uint8)
        scales = np.full((columns, blocks), self.scale / 4.6 / np.sqrt(rows), np.float32)  # 4 bits spread by 4.6
        inputs = [source, self.weight(f"{name}.quant", packed), self.weight(f"{name}.scales", scales)]
        return self.node(
            "MatMulNBits",
            inputs,
            [f"{name}/out"],
            "com.microsoft",
            K=rows,
            N=columns,
            bits=4,
            block_size=BLOCK,
            accuracy_level=4,
        )


def grouped(*, int4: bool = False, scale: float = 1.0, window: int = 0) -> ModelProto:
    """Return a decoder as ONNX Runtime GenAI's builder writes it, with GroupQueryAttention and skipped norms.

    Args:
        int4: store matrices as 4 bits in blocks, with 8 bits in the products (``accuracy_level=4``).
        scale: of what products give.
        window: tokens that the first layer sees, in a cache that slides; 0 for all.
    """
    writer = _Writer(int4=int4, scale=scale)
    total = writer.node("Shape", ["attention_mask"], ["mask/shape"])
    total = writer.node("Gather", [total, writer.weight("one", np.array(1, np.int64))], ["mask/total"], axis=0)
    total = writer.node("Cast", [total], ["total_seq_len"], to=TensorProto.INT32)
    summed = writer.node(
        "ReduceSum", ["attention_mask", writer.weight("axis", np.array([1]))], ["mask/sum"], keepdims=0
    )
    last = writer.node("Sub", [summed, "one"], ["mask/last"])
    last = writer.node("Cast", [last], ["seqlens_k"], to=TensorProto.INT32)
    angles = np.outer(np.arange(POSITIONS), 100.0 ** -(np.arange(HEAD // 2) / (HEAD // 2)))
    tables = [writer.weight("cos_cache", np.cos(angles).astype(np.float32))]
    tables.append(writer.weight("sin_cache", np.sin(angles).astype(np.float32)))
    residual = writer.node("Gather", [writer.drawn("embedding", TOKENS, HIDDEN, scale=1.0), "input_ids"], ["embed/out"])
    branch = ""
    for layer in range(LAYERS):
        slides = {"local_window_size": window, "sliding_window_cache": 1} if window and not layer else {}
        residual, normed = _norm(writer, f"layer.{layer}.first", residual, branch)
        query, key, value = (
            writer.project(normed, f"layer.{layer}.{part}", HIDDEN, heads * HEAD)
            for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        attended = writer.node(
            "GroupQueryAttention",
            [query, key, value, *_caches("past_key_values", layer), last, total, *tables],
            [f"layer.{layer}.attention", *_caches("present", layer)],
            "com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
            **slides,
        )
        branch = writer.project(attended, f"layer.{layer}.o", HIDDEN, HIDDEN)
        residual, normed = _norm(writer, f"layer.{layer}.second", residual, branch)
        branch = _gated(writer, layer, normed)
    _, normed = _norm(writer, "final", residual, branch)
    writer.project(normed, "lm_head", HIDDEN, TOKENS)
    writer.nodes[-1].output[0] = "logits"
    model = _decoder(writer, opset=17, positions=False)
    for entry in model.graph.input if window else ():
        if entry.name in _caches("past_key_values", 0):
            entry.type.tensor_type.shape.dim[2].dim_param = "past_sliding_length"
    return model


def plain() -> ModelProto:
    """Return a decoder as exporters write it in ONNX's own ops, with caches that are concatenated."""
    writer = _Writer(int4=False, scale=1.0)
    hidden = writer.node("Gather", [writer.drawn("embedding", TOKENS, HIDDEN, scale=1.0), "input_ids"], ["embed/out"])
    places = writer.node(
        "Gather", [writer.drawn("places", POSITIONS, HIDDEN, scale=0.1), "position_ids"], ["place/out"]
    )
    hidden = writer.node("Add", [hidden, places], ["embed/sum"])
    shown = writer.node("Cast", ["attention_mask"], ["mask/float"], to=TensorProto.FLOAT)
    shown = writer.node("Sub", [writer.weight("float.one", np.array(1, np.float32)), shown], ["mask/hidden"])
    shown = writer.node("Mul", [shown, writer.weight("least", np.array(-1e4, np.float32))], ["mask/bias"])
    shown = writer.node("Unsqueeze", [shown, writer.weight("axes", np.array([1, 2]))], ["mask/broad"])
    split = writer.weight("split", np.array([0, 0, HEADS, HEAD]))
    merged = writer.weight("merged", np.array([0, 0, HIDDEN]))
    for layer in range(LAYERS):
        name = f"layer.{layer}"
        normed = _layer_norm(writer, f"{name}.first", hidden)
        parts = {}
        for part in ("q", "k", "v"):
            flat = writer.project(normed, f"{name}.{part}", HIDDEN, HIDDEN)
            flat = writer.node("Reshape", [flat, split], [f"{name}.{part}/heads"])
            parts[part] = writer.node("Transpose", [flat], [f"{name}.{part}/turned"], perm=[0, 2, 1, 3])
        keys, values = (
            writer.node("Concat", [past, parts[part]], [present], axis=2)
            for part, past, present in zip(
                "kv", _caches("past_key_values", layer), _caches("present", layer), strict=True
            )
        )
        turned = writer.node("Transpose", [keys], [f"{name}/keys"], perm=[0, 1, 3, 2])
        scores = writer.node("MatMul", [parts["q"], turned], [f"{name}/scores"])
        scores = writer.node(
            "Div", [scores, writer.weight(f"{name}.root", np.array(4, np.float32))], [f"{name}/scaled"]
        )
        scores = writer.node("Add", [scores, shown], [f"{name}/masked"])
        scores = writer.node("Softmax", [scores], [f"{name}/shares"], axis=-1)
        mixed = writer.node("MatMul", [scores, values], [f"{name}/mixed"])
        mixed = writer.node("Transpose", [mixed], [f"{name}/mixed/turned"], perm=[0, 2, 1, 3])
        mixed = writer.node("Reshape", [mixed, merged], [f"{name}/merged"])
        mixed = writer.project(mixed, f"{name}.o", HIDDEN, HIDDEN)
        hidden = writer.node("Add", [hidden, mixed], [f"{name}/attended"])
        fed = _gated(writer, layer, _layer_norm(writer, f"{name}.second", hidden))
        hidden = writer.node("Add", [hidden, fed], [f"{name}/out"])
    writer.project(_layer_norm(writer, "final", hidden), "lm_head", HIDDEN, TOKENS)
    writer.nodes[-1].output[0] = "logits"
    return _decoder(writer, opset=17, positions=True)


def _caches(name: str, layer: int) -> list[str]:
    return [f"{name}.{layer}.key", f"{name}.{layer}.value"]


def _norm(writer: _Writer, name: str, residual: str, branch: str) -> tuple[str, str]:
    """Return the residual, and its norm."""
    weight = writer.weight(f"{name}.norm", np.ones(HIDDEN, np.float32))
    if not branch:
        normed = writer.node(
            "SimplifiedLayerNormalization", [residual, weight], [f"{name}/normed"], axis=-1, epsilon=1e-5
        )
        return residual, normed
    normed = writer.node(
        "SkipSimplifiedLayerNormalization",
        [residual, branch, weight],
        [f"{name}/normed", "", "", f"{name}/residual"],
        "com.microsoft",
        epsilon=1e-5,
    )
    return f"{name}/residual", normed


def _layer_norm(writer: _Writer, name: str, source: str) -> str:
    scale = writer.weight(f"{name}.scale", np.ones(HIDDEN, np.float32))
    bias = writer.weight(f"{name}.bias", np.zeros(HIDDEN, np.float32))
    return writer.node("LayerNormalization", [source, scale, bias], [f"{name}/normed"], axis=-1)


def _gated(writer: _Writer, layer: int, source: str) -> str:
    """Return the output of a gated feed-forward network."""
    name = f"layer.{layer}"
    gate = writer.project(source, f"{name}.gate", HIDDEN, INNER)
    share = writer.node("Sigmoid", [gate], [f"{name}/share"])
    gate = writer.node("Mul", [gate, share], [f"{name}/silu"])
    up = writer.project(source, f"{name}.up", HIDDEN, INNER)
    return writer.project(writer.node("Mul", [gate, up], [f"{name}/gated"]), f"{name}.down", INNER, HIDDEN)


def _decoder(writer: _Writer, *, opset: int, positions: bool) -> ModelProto:
    """Return the model with the inputs and outputs that decoders have."""
    kv_heads = HEADS if positions else KV_HEADS
    integers = {"input_ids": "sequence_length", "attention_mask": "total_sequence_length"}
    if positions:
        integers["position_ids"] = "sequence_length"
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch_size", length])
        for name, length in integers.items()
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", TOKENS])]
    for length, entries, prefix in (
        ("past_sequence_length", inputs, "past_key_values"),
        ("total_sequence_length", outputs, "present"),
    ):
        entries += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch_size", kv_heads, length, HEAD])
            for layer in range(LAYERS)
            for name in _caches(prefix, layer)
        ]
    graph = helper.make_graph(writer.nodes, "decoder", inputs, outputs, writer.weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]
"""Computes all outputs in their order for inputs by name."""


def on_cpu(model: ModelProto) -> Run:
    """Return what runs a model in ONNX Runtime on the CPU."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return partial(session.run, None)


def generate(run: Run, model: ModelProto, prompt: list[int], count: int) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens that a decoder generates greedily after a prompt, and the logits that it takes them from.

    Args:
        run: the decoder.
        model: the same, whose inputs say which types its caches have.
        prompt: tokens.
        count: how many tokens.
    """
    caches: dict[str, np.ndarray] = {}
    for entry in model.graph.input:
        if entry.name.startswith("past_key_values"):
            dtype = helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
            caches[entry.name] = np.zeros((1, entry.type.tensor_type.shape.dim[1].dim_value, 0, HEAD), dtype)
    has_positions = any(entry.name == "position_ids" for entry in model.graph.input)
    tokens, rows, new, past = list[int](), list[np.ndarray](), prompt, 0
    while len(tokens) < count:
        feeds: dict[str, np.ndarray] = {"input_ids": np.array([new]), **caches}
        feeds["attention_mask"] = np.ones((1, past + len(new)), np.int64)
        if has_positions:
            feeds["position_ids"] = np.arange(past, past + len(new))[None]
        logits, *presents = run(feeds)
        past += len(new)
        caches = dict(zip(caches, presents, strict=True))
        rows.append(logits[0, -1])
        new = [int(logits[0, -1].argmax())]
        tokens += new
    return tokens, rows


def next_tokens(run: Run, model: ModelProto, count: int) -> list[int]:
    """Return the tokens that a decoder generates greedily after a prompt of five tokens."""
    return generate(run, model, [3, 14, 15, 9, 26], count)[0]


def disturbed(model: ModelProto) -> ModelProto:
    """Return a decoder with other weights in its last product, so that it chooses other tokens now and then."""
    result = ModelProto()
    result.CopyFrom(model)
    (weight,) = (tensor for tensor in result.graph.initializer if tensor.name == "lm_head.weight")
    noise = np.random.default_rng(3).standard_normal(weight.dims).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 0.008 * noise, weight.name))
    return result


def folder(home: Path, kind: str, model: ModelProto) -> Path:
    """Write a folder as software of that kind ships it: "genai", "transformers.js" or "optimum"."""
    home.mkdir(parents=True, exist_ok=True)
    configs: dict[str, Any] = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": {"model_max_length": POSITIONS}}
    match kind:
        case "genai":
            configs["genai_config.json"] = {
                "model": {
                    "type": "llama",
                    "vocab_size": TOKENS,
                    "context_length": POSITIONS,
                    "bos_token_id": 0,
                    "eos_token_id": TOKENS - 1,
                    "pad_token_id": 0,
                    "decoder": {
                        "session_options": {"provider_options": []},
                        "filename": "model.onnx",
                        "head_size": HEAD,
                        "hidden_size": HIDDEN,
                        "num_attention_heads": HEADS,
                        "num_key_value_heads": KV_HEADS,
                        "num_hidden_layers": LAYERS,
                        "inputs": {
                            "input_ids": "input_ids",
                            "attention_mask": "attention_mask",
                            "past_key_names": "past_key_values.%d.key",
                            "past_value_names": "past_key_values.%d.value",
                        },
                        "outputs": {
                            "logits": "logits",
                            "present_key_names": "present.%d.key",
                            "present_value_names": "present.%d.value",
                        },
                    },
                },
                "search": {"max_length": POSITIONS, "past_present_share_buffer": True},
            }
        case _:
            configs["config.json"] = {
                "model_type": "llama",
                "torch_dtype": "float32",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": TOKENS,
                "hidden_size": HIDDEN,
                "num_attention_heads": HEADS,
                "num_key_value_heads": model.graph.input[-1].type.tensor_type.shape.dim[1].dim_value,
                "num_hidden_layers": LAYERS,
                "max_position_embeddings": POSITIONS,
                "eos_token_id": TOKENS - 1,
            }
    for name, config in configs.items():
        (home / name).write_text(json.dumps(config, indent=4), encoding="utf-8")
    (home / "LICENSE").write_text("Do what you like.\n", encoding="utf-8")
    below = home / "onnx" if kind == "transformers.js" else home
    below.mkdir(exist_ok=True)
    onnx.save(
        model,
        below / "model.onnx",
        save_as_external_data=kind == "genai",
        location="model.onnx.data",
        size_threshold=64,
    )
    return home
