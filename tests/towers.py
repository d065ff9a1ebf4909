"""Small networks that see and hear, in the forms in which language models with several graphs are shipped."""

import json
from pathlib import Path

import decoders
import numpy as np
import onnx
from graphs.case import add_weights, parse
from onnx import ModelProto

IMAGE = 90
"""The token that stands where a feature of an image goes."""
PATCH, WIDTH = 12, 16

VISION = f"""(float[num_patches,{PATCH}] pixel_values, int64[num_images,3] image_grid_thw)
    => (float[m,{decoders.HIDDEN}] image_features) {{
    patched = MatMul (pixel_values, patch) grid = Gather <axis = 0> (image_grid_thw, zero)
    frames = Slice (grid, zeros, ones) area = Slice (grid, ones, threes)
    rows = Gather <axis = 0> (grid, one) columns = Gather <axis = 0> (grid, two)
    downward = Range (zero, rows, one) standing = Unsqueeze (downward, ones)
    rightward = Range (zero, columns, one) lying = Unsqueeze (rightward, zeros)
    row = Expand (standing, area) row_of_each = Reshape (row, flat) row_of_all = Tile (row_of_each, frames)
    column = Expand (lying, area) column_of_each = Reshape (column, flat) column_of_all = Tile (column_of_each, frames)
    rowed = Gather (row_table, row_of_all) columned = Gather (column_table, column_of_all)
    places = Add (rowed, columned) placed = Add (patched, places) normed = LayerNormalization (placed, gain)
    q = MatMul (normed, wq) k = MatMul (normed, wk) turned = Transpose (k) scores = MatMul (q, turned)
    shares = Softmax (scores) seen = MatMul (shares, normed) summed = Add (placed, seen)
    merged = Reshape (summed, by_four) image_features = MatMul (merged, head) }}"""
"""A tower as Qwen's: positions follow from the grid, and four patches become one feature."""

HEARING = f"""(float[batch_size,16,frames] input_features, int64[batch_size] audio_sizes)
    => (float[batch_size,n,{decoders.HIDDEN}] audio_features) {{
    conv = Conv <kernel_shape = [3], strides = [2], pads = [1,1]> (input_features, kernel) active = Relu (conv)
    turned = Transpose <perm = [0,2,1]> (active) normed = LayerNormalization (turned, gain)
    longest = ReduceMax <keepdims = 0> (audio_sizes) half = Div (longest, two) last = Unsqueeze (half, zeros)
    cut = Slice (normed, zeros, last, ones) audio_features = MatMul (cut, head) }}"""

EMBEDDING = f"""(int64[batch_size,sequence_length] input_ids, float[num_image_tokens,{decoders.HIDDEN}] image_features)
    => (float[batch_size,sequence_length,{decoders.HIDDEN}] inputs_embeds) {{
    known = Gather (table, input_ids) here = Equal (input_ids, image) where = NonZero (here) places = Transpose (where)
    inputs_embeds = ScatterND (known, places, image_features) }}"""
"""Features of images replace the embeddings of one token: there must be as many of both."""


_COUNTS = {name: np.array(number) for number, name in enumerate(("zero", "one", "two"))}
_COUNTS |= {"zeros": np.array([0]), "ones": np.array([1]), "threes": np.array([3]), "flat": np.array([-1])}


def vision() -> ModelProto:
    """Return a tower whose input are patches and their grid."""
    matrices = {
        "patch": (PATCH, WIDTH),
        "wq": (WIDTH, WIDTH),
        "wk": (WIDTH, WIDTH),
        "head": (4 * WIDTH, decoders.HIDDEN),
    }
    tables = {"row_table": (64, WIDTH), "column_table": (64, WIDTH)}
    others = {"gain": np.ones(WIDTH, np.float32), "by_four": np.array([-1, 4 * WIDTH])}
    return add_weights(parse(VISION), {**matrices, **tables, **others, **_COUNTS})


def hearing() -> ModelProto:
    """Return a tower whose input are frames of sound and their number."""
    matrices = {"kernel": (WIDTH, 16, 3), "head": (WIDTH, decoders.HIDDEN)}
    return add_weights(parse(HEARING), {**matrices, "gain": np.ones(WIDTH, np.float32), **_COUNTS})


def embedding() -> ModelProto:
    """Return what puts features of images among the embeddings of tokens."""
    table = (decoders.TOKENS, decoders.HIDDEN)
    return add_weights(parse(EMBEDDING), {"table": table, "image": np.array(IMAGE)})


def text() -> ModelProto:
    """Return a decoder of embeddings."""
    model = decoders.grouped()
    (look_up,) = (node for node in model.graph.node if node.input[:1] == ["embedding"])
    hidden = look_up.output[0]
    model.graph.node.remove(look_up)
    for node in model.graph.node:
        node.input[:] = ["inputs_embeds" if name == hidden else name for name in node.input]
    shape = ["batch_size", "sequence_length", decoders.HIDDEN]
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("inputs_embeds", onnx.TensorProto.FLOAT, shape))
    kept = [weight for weight in model.graph.initializer if weight.name != "embedding"]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def folder(home: Path) -> Path:
    """Write a folder of ONNX Runtime GenAI with four graphs, of which one is a decoder."""
    decoders.folder(home, "genai", text())
    config = json.loads((home / "genai_config.json").read_text(encoding="utf-8"))
    for part, file in {"vision": "vision.onnx", "speech": "speech.onnx", "embedding": "embedding.onnx"}.items():
        config["model"][part] = {"filename": file}
    (home / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, model in {"vision": vision(), "speech": hearing(), "embedding": embedding()}.items():
        onnx.save(model, home / f"{name}.onnx")
    return home
