"""Author the model zoo: small float32 models with seeded weights, most with a trap for lower precision.

python scripts/make_models.py [--out models]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from model_parts import HEAD_SIZE, HEADS, HIDDEN, LOWEST, serialize

INNER, VOCABULARY = 128, 128


def classifier() -> gs.Graph:
    """Image classifier of Conv-BatchNormalization-Relu blocks, one of them residual."""
    g = gs.Graph(name="classifier", opset=17)

    def block(name: str, x: gs.Tensor, size: tuple[int, int], *, stride: int = 1, relu: bool = True) -> gs.Variable:
        x = g.conv(f"{name}/conv", x, size, stride=stride, bias=False)
        x = g.batch_norm(f"{name}/norm", x, size[1])
        return g.op("Relu", f"{name}/relu", x) if relu else x

    x = g.input("image", np.float32, "batch", 3, 32, 32)
    x = block("stem", x, (3, 16))
    x = skip = g.op("MaxPool", "stem/pool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = block("residual/0", x, (16, 16))
    x = block("residual/1", x, (16, 16), relu=False)
    x = g.op("Relu", "residual/relu", g.op("Add", "residual/add", x, skip))
    x = block("stage/0", x, (16, 32), stride=2)
    x = block("stage/1", x, (32, 64), stride=2)
    x = g.op("GlobalAveragePool", "head/pool", x)
    x = g.gemm("head/fc", g.op("Flatten", "head/flatten", x, axis=1), (64, 10))
    g.output(x, "logits", np.float32, "batch", 10)
    return g


def encoder() -> gs.Graph:
    """BERT-like encoder, written so that ONNX Runtime finds its LayerNormalization and Gelu fusions."""
    g = gs.Graph(name="encoder", opset=17)
    ids = g.input("input_ids", np.int64, "batch", "sequence")
    mask = g.input("attention_mask", np.int64, "batch", "sequence")

    words = g.op("Gather", "embeddings/words", g.weight("embeddings/word_table", VOCABULARY, HIDDEN, fan_in=1), ids)
    length = g.op("Unsqueeze", "embeddings/length", g.dimension("embeddings/sequence", ids, 1), [0])
    places = g.op("Slice", "embeddings/places", np.arange(64)[None], [0], length, [1])
    table = g.weight("embeddings/position_table", 64, HIDDEN, fan_in=1, gain=0.3)
    x = g.op("Add", "embeddings/add", words, g.op("Gather", "embeddings/positions", table, places))
    x = g.layer_norm("embeddings/norm", x, HIDDEN)

    # 0 where a token is, the lowest float32 where padding is: in float16, 0 * -inf is NaN.
    mask = g.op("Cast", "mask/cast", g.op("Unsqueeze", "mask/unsqueeze", mask, [1, 2]), to=onnx.TensorProto.FLOAT)
    mask = g.op("Mul", "mask/lowest", g.op("Sub", "mask/invert", 1.0, mask), LOWEST)
    for index in range(2):
        x = encoder_layer(g, f"encoder/{index}", x, mask)
    g.output(x, "last_hidden_state", np.float32, "batch", "sequence", HIDDEN)

    first = g.gemm("pooler/fc", g.op("Gather", "pooler/first", x, 0, axis=1), (HIDDEN, HIDDEN))
    g.output(g.op("Tanh", "pooler/tanh", first), "pooled", np.float32, "batch", HIDDEN)
    return g


def encoder_layer(g: gs.Graph, name: str, x: gs.Tensor, mask: gs.Tensor) -> gs.Variable:
    """Self-attention and feed-forward network, each with its residual Add and then its norm."""

    def projected(what: str) -> gs.Variable:
        value = g.linear(f"{name}/attention/{what}", x, (HIDDEN, HIDDEN))
        return g.split_heads(f"{name}/attention/{what}", value)

    query, key, value = projected("query"), projected("key"), projected("value")
    scale = ("Div", math.sqrt(HEAD_SIZE))
    context = g.attention(f"{name}/attention", query, key, value, mask=mask, scale=scale)
    context = g.linear(f"{name}/attention/output", context, (HIDDEN, HIDDEN))
    x = g.layer_norm(f"{name}/attention/norm", g.op("Add", f"{name}/attention/residual", context, x), HIDDEN)

    inner = g.gelu(f"{name}/mlp/gelu", g.linear(f"{name}/mlp/up", x, (HIDDEN, INNER)))
    inner = g.linear(f"{name}/mlp/down", inner, (INNER, HIDDEN))
    return g.layer_norm(f"{name}/mlp/norm", g.op("Add", f"{name}/mlp/residual", inner, x), HIDDEN)


def decoder() -> gs.Graph:
    """Decoder step with a key/value cache. Its residual stream is in the hundreds: squared, past float16."""
    g = gs.Graph(name="decoder", opset=17)
    ids = g.input("input_ids", np.int64, "batch", "sequence")
    positions = g.input("position_ids", np.int64, "batch", "sequence")
    past = [
        [g.input(f"past_{kind}.{i}", np.float32, "batch", HEADS, "past", HEAD_SIZE) for kind in ("key", "value")]
        for i in range(2)
    ]
    table = g.weight("embeddings/table", VOCABULARY, HIDDEN, fan_in=1)
    x = g.op("Mul", "embeddings/scale", g.op("Gather", "embeddings/words", table, ids), 300.0)
    rotary, mask = g.rotary_angles(positions), g.causal_mask(ids, past[0][0])
    presents = []
    for index, cache in enumerate(past):
        x, present = decoder_layer(g, f"decoder/{index}", x, rotary, cache, mask=mask)
        presents.append(present)
    x = g.rms_norm("head/norm", x, HIDDEN, reciprocal=True)
    columns = g.op("Transpose", "head/columns", table, perm=[1, 0])  # the embedding table, used a second time
    x = g.op("Mul", "head/scale", g.op("MatMul", "head/matmul", x, columns), HIDDEN**-0.5)
    g.output(x, "logits", np.float32, "batch", "sequence", VOCABULARY)
    for index, present in enumerate(presents):
        for kind, value in zip(("key", "value"), present, strict=True):
            g.output(value, f"present_{kind}.{index}", np.float32, "batch", HEADS, "total", HEAD_SIZE)
    return g


def decoder_layer(g: gs.Graph, name: str, x: gs.Tensor, rotary: list, past: list, *, mask: gs.Tensor) -> tuple:
    """Pre-norm attention over cache and new tokens, then a gated feed-forward network."""
    normed = g.rms_norm(f"{name}/attention/norm", x, HIDDEN)

    def projected(what: str) -> gs.Variable:
        value = g.linear(f"{name}/attention/{what}", normed, (HIDDEN, HIDDEN), bias=False)
        return g.split_heads(f"{name}/attention/{what}", value)

    query = g.rotate(f"{name}/attention/query/rotary", projected("query"), rotary)
    key = g.rotate(f"{name}/attention/key/rotary", projected("key"), rotary)
    key = g.op("Concat", f"{name}/attention/key/cache", past[0], key, axis=2)
    value = g.op("Concat", f"{name}/attention/value/cache", past[1], projected("value"), axis=2)

    scale = ("Mul", HEAD_SIZE**-0.5)
    context = g.attention(f"{name}/attention", query, key, value, mask=mask, scale=scale)
    # The gain lifts what a layer adds to the size of what it adds to.
    context = g.linear(f"{name}/attention/output", context, (HIDDEN, HIDDEN), gain=200.0, bias=False)
    x = g.op("Add", f"{name}/attention/residual", x, context)

    normed = g.rms_norm(f"{name}/mlp/norm", x, HIDDEN)
    gate = g.silu(f"{name}/mlp/silu", g.linear(f"{name}/mlp/gate", normed, (HIDDEN, INNER), bias=False))
    inner = g.op("Mul", f"{name}/mlp/gated", gate, g.linear(f"{name}/mlp/up", normed, (HIDDEN, INNER), bias=False))
    inner = g.linear(f"{name}/mlp/down", inner, (INNER, HIDDEN), gain=200.0, bias=False)
    return g.op("Add", f"{name}/mlp/residual", x, inner), (key, value)


def unet() -> gs.Graph:
    """U-Net with a different way up at each of its three levels."""
    g = gs.Graph(name="unet", opset=18)

    def block(name: str, x: gs.Tensor, size: tuple[int, int], kind: str = "Relu", **attrs: float) -> gs.Variable:
        x = g.instance_norm(f"{name}/norm", g.conv(f"{name}/conv", x, size), size[1])
        return g.op(kind, f"{name}/activation", x, **attrs)

    def halved(name: str, x: gs.Tensor) -> gs.Variable:
        return g.op("MaxPool", f"{name}/pool", x, kernel_shape=[2, 2], strides=[2, 2])

    image = g.input("image", np.float32, "batch", 1, "height", "width")
    level0 = block("down/0", image, (1, 8), "LeakyRelu", alpha=0.1)
    level1 = block("down/1", halved("down/0", level0), (8, 16), "LeakyRelu", alpha=0.1)
    level2 = block("down/2", halved("down/1", level1), (16, 24), "LeakyRelu", alpha=0.1)
    x = block("bottom", halved("down/2", level2), (24, 32))

    kernel = g.weight("up/2/transposed/weight", 32, 24, 2, 2, fan_in=32)
    bias = g.uniform("up/2/transposed/bias", (24,), -0.1, 0.1)
    x = g.op("ConvTranspose", "up/2/transposed", x, kernel, bias, kernel_shape=[2, 2], strides=[2, 2])
    x = block("up/2", g.op("Concat", "up/2/skip", x, level2, axis=1), (48, 24))

    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    x = g.op("Resize", "up/1/resize", x, None, [1.0, 1.0, 2.0, 2.0], **nearest)
    x = block("up/1", g.op("Concat", "up/1/skip", x, level1, axis=1), (40, 16))

    # The last level takes its size from the skip connection, as exports of interpolate(size=...) do.
    channels = g.op("Slice", "up/0/channels", g.op("Shape", "up/0/shape", x), [0], [2])
    space = g.op("Slice", "up/0/space", g.op("Shape", "up/0/skip_shape", level0), [2], [4])
    sizes = g.op("Concat", "up/0/sizes", channels, space, axis=0)
    x = g.op("Resize", "up/0/resize", x, None, None, sizes, mode="linear")
    x = block("up/0", g.op("Concat", "up/0/skip", x, level0, axis=1), (24, 8))
    x = g.op("Sigmoid", "head/sigmoid", g.conv("head/conv", x, (8, 1), kernel=1))
    g.output(x, "mask", np.float32, "batch", 1, "height", "width")
    return g


def detector() -> gs.Graph:
    """Detector from 8-bit image to selected boxes: the ranking of scores decides about shapes and indices."""
    g = gs.Graph(name="detector", opset=17)
    classes, cells, kept = 3, 16, 32
    x = g.input("image", np.uint8, "batch", 3, 128, 128)
    x = g.op("Cast", "image/cast", x, to=onnx.TensorProto.FLOAT)
    x = g.op("Div", "image/scaled", g.op("Sub", "image/centred", x, 127.5), 73.9)
    for index, size in enumerate([(3, 16), (16, 32), (32, 48)]):
        x = g.silu(f"backbone/{index}/silu", g.conv(f"backbone/{index}/conv", x, size, stride=2))
    x = g.conv("head/conv", x, (48, 4 + classes), kernel=1)
    x = g.op("Transpose", "head/transpose", g.op("Reshape", "head/flat", x, [0, 4 + classes, -1]), perm=[0, 2, 1])
    center, extent, score = g.op("Split", "head/split", x, [2, 2, classes], axis=2, outputs=3)

    grid = np.stack(np.meshgrid(np.arange(cells), np.arange(cells)), -1).reshape(1, -1, 2).astype(np.float32)
    center = g.op("Add", "boxes/grid", g.op("Sigmoid", "boxes/offset", center), grid)
    center = g.op("Mul", "boxes/centre", center, 8.0)
    half = g.op("Mul", "boxes/half", g.op("Exp", "boxes/exp", extent), 8.0)
    corners = [g.op("Sub", "boxes/low", center, half), g.op("Add", "boxes/high", center, half)]
    boxes = g.op("Concat", "boxes/corners", *corners, axis=2)

    score = g.op("Sigmoid", "scores/sigmoid", score)
    best = g.op("ReduceMax", "scores/best", score, axes=[2], keepdims=0)
    _, index = g.op("TopK", "top/k", best, [kept], axis=1, outputs=2)
    index = g.op("Unsqueeze", "top/index", index, [2])
    wide = g.op("Tile", "top/box_index", index, [1, 1, 4])
    boxes = g.op("GatherElements", "top/boxes", boxes, wide, axis=1)
    wide = g.op("Tile", "top/score_index", index, [1, 1, classes])
    score = g.op("GatherElements", "top/scores", score, wide, axis=1)
    score = g.op("Transpose", "top/class_scores", score, perm=[0, 2, 1])

    chosen = g.op("NonMaxSuppression", "nms", boxes, score, [8], np.float32([0.5]), np.float32([0.55]))
    batch, label, box = (
        g.op("Gather", f"chosen/{n}", chosen, i, axis=1) for i, n in enumerate(["batch", "class", "box"])
    )
    row = g.op("Add", "chosen/row", g.op("Mul", "chosen/offset", batch, kept), box)
    boxes = g.op("Gather", "chosen/boxes", g.op("Reshape", "chosen/all_boxes", boxes, [-1, 4]), row)
    g.output(boxes, "boxes", np.float32, "chosen", 4)
    g.output(g.op("GatherND", "chosen/scores", score, chosen), "scores", np.float32, "chosen")
    g.output(g.op("Cast", "chosen/labels", label, to=onnx.TensorProto.INT32), "labels", np.int32, "chosen")
    g.output(batch, "batch_index", np.int64, "chosen")
    return g


def recurrent() -> gs.Graph:
    """LSTM, If and Loop: precision has to cross subgraph borders, by captured values as by carried ones."""
    g = gs.Graph(name="recurrent", opset=17)
    size, features = 32, 16
    x = g.input("features", np.float32, "time", "batch", features)
    start = g.input("initial_state", np.float32, 1, "batch", size)
    refine = g.input("refine", np.bool_)
    steps = g.input("steps", np.int64)

    weights = g.weight("lstm/weight", 1, 4 * size, features, fan_in=features)
    recurrence = g.weight("lstm/recurrence", 1, 4 * size, size, fan_in=size)
    bias = g.uniform("lstm/bias", (1, 8 * size), -0.1, 0.1)
    # No sequence lengths, no initial cell, no peepholes: one gap among the inputs and two at their end.
    lstm = g.op("LSTM", "lstm", x, weights, recurrence, bias, None, start, None, None, outputs=3, hidden_size=size)
    summary = g.op("Tanh", "summary", g.op("ReduceMean", "mean", lstm[0], axes=[0, 1], keepdims=0))
    last = g.op("Squeeze", "last", lstm[1], [0])
    g.output(lstm[2], "cell", np.float32, 1, "batch", size)

    branches = {"then_branch": refined(last, summary, size), "else_branch": scaled(last, summary, size)}
    merged = g.op("If", "choice", refine, **branches)
    state, trace = g.op("Loop", "loop", steps, None, last, outputs=2, body=loop_body(merged, size))
    g.output(state, "state", np.float32, "batch", size)
    g.output(trace, "trace", np.float32, "steps", "batch", 4)
    return g


def refined(last: gs.Variable, summary: gs.Variable, size: int) -> gs.Graph:
    """The branch with a MatMul."""
    g = gs.Graph(name="refined", opset=17)
    x = g.linear("refined/linear", last, (size, size))
    g.output(g.op("Add", "refined/add", x, summary), "refined/merged", np.float32, "batch", size)
    return g


def scaled(last: gs.Variable, summary: gs.Variable, size: int) -> gs.Graph:
    """The branch without."""
    g = gs.Graph(name="scaled", opset=17)
    x = g.op("Mul", "scaled/mul", last, g.uniform("scaled/scale", (size,), 0.5, 1.5))
    g.output(g.op("Sub", "scaled/sub", x, summary), "scaled/merged", np.float32, "batch", size)
    return g


def loop_body(merged: gs.Variable, size: int) -> gs.Graph:
    """Carries a float32 state; captures what the If gave."""
    g = gs.Graph(name="loop", opset=17)
    g.input("loop/iteration", np.int64)
    going = g.input("loop/going", np.bool_)
    state = g.input("loop/state", np.float32, "batch", size)
    x = g.op("Add", "loop/inject", g.linear("loop/linear", state, (size, size)), merged)
    x = g.op("Tanh", "loop/tanh", x)
    g.output(g.op("Identity", "loop/continue", going), "loop/going_out", np.bool_)
    g.output(x, "loop/state_out", np.float32, "batch", size)
    g.output(g.linear("loop/trace", x, (size, 4)), "loop/trace_out", np.float32, "batch", 4)
    return g


NOTES, HARMONICS = 24, 16


def text_encoder() -> gs.Graph:
    """The first model of a toy pipeline for speech: letters in, features out."""
    g = gs.Graph(name="text_encoder", opset=17)
    ids = g.input("ids", np.int64, "batch", "letters")
    x = g.op("Gather", "letters", g.weight("letters/table", 32, INNER, fan_in=1), ids)
    for index in range(2):
        name = f"block/{index}"
        inner = g.gelu(f"{name}/gelu", g.linear(f"{name}/up", x, (INNER, INNER)))
        x = g.op("Add", f"{name}/residual", x, g.linear(f"{name}/down", inner, (INNER, INNER)))
        x = g.layer_norm(f"{name}/norm", x, INNER)
    g.output(x, "features", np.float32, "batch", "letters", INNER)
    return g


def acoustic() -> gs.Graph:
    """The second one: for each frame, scores of notes and the loudness."""
    g = gs.Graph(name="acoustic", opset=17)
    x = g.input("features", np.float32, "batch", "frames", INNER)
    for index in range(3):
        inner = g.op("Relu", f"block/{index}/relu", g.linear(f"block/{index}/linear", x, (INNER, INNER), gain=2**0.5))
        x = g.op("Add", f"block/{index}/residual", x, inner)
    g.output(g.linear("notes", x, (INNER, NOTES)), "notes", np.float32, "batch", "frames", NOTES)
    loud = g.op("Sigmoid", "loudness/sigmoid", g.linear("loudness", x, (INNER, 1), gain=0.3))
    g.output(loud, "loudness", np.float32, "batch", "frames", 1)
    return g


def vocoder() -> gs.Graph:
    """The last one sums up phases of sines: after a thousand radians, low precision cannot tell where they are."""
    g = gs.Graph(name="vocoder", opset=17)
    notes = g.input("notes", np.int64, "batch", "samples")
    loudness = g.input("loudness", np.float32, "batch", "samples", 1)
    steps = g.op("Gather", "steps", g.uniform("steps/table", (NOTES, HARMONICS), 1.0, 2.0), notes)
    steps = g.op("MatMul", "detuned", steps, g.uniform("detuned/weight", (HARMONICS, HARMONICS), 0.04, 0.1))
    sines = g.op("Sin", "sines", g.op("CumSum", "phases", steps, 1))
    audio = g.op("Mul", "audio", g.op("ReduceMean", "mix", sines, axes=[-1], keepdims=1), loudness)
    g.output(audio, "audio", np.float32, "batch", "samples", 1)
    return g


MODELS = [classifier, encoder, decoder, unet, detector, recurrent]
SPEECH = [text_encoder, acoustic, vocoder]
"""Models that work together, in a folder of their own."""


def main() -> None:
    """Write every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder to write to (default: models)")
    folder = parser.parse_args().out
    (folder / "speech").mkdir(parents=True, exist_ok=True)
    for build in (*MODELS, *SPEECH):
        data = serialize(build())
        path = folder / ("speech" if build in SPEECH else "") / f"{build.__name__}.onnx"
        path.write_bytes(data)
        print(path.name, len(data))


if __name__ == "__main__":
    main()
