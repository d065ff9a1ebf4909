"""Errors of int8 networks and of their float16 rest, against the float32 models that were quantized.

python benchmarks/int8.py [FOLDER ...] [--dims NAME=SIZE ...] [--samples N] [--quick] [--check]

ONNX Runtime's static quantizer quantizes the models of the repository and of the folders in three ways: products alone,
every op it knows, and that with int32 biases. Each result is converted at O2 for TensorRT, and both run on the same
inputs: those of an .npz beside the model, then random ones. A small change moves numbers across the border of two
integers, so the error on one input is a draw. Root mean squares over all inputs are therefore what is compared, and for
each single input it is counted which of the two models is off by more than the other allows. Networks that are off by
half and more in int8 already are listed, but not judged; slow ones see fewer inputs. Writes
benchmarks/results/int8.json, unless ``--quick`` asks for three of the repository's models and the first way.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import onnxamp
from onnxamp._runtime.emulate import emulate

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCTS: Final = ["Conv", "ConvTranspose", "Gemm", "MatMul"]
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "products": {"op_types_to_quantize": PRODUCTS, "QuantizeBias": False},
    "every op": {"op_types_to_quantize": None, "QuantizeBias": False},
    "every op, int32 biases": {"op_types_to_quantize": None, "QuantizeBias": True},
}
CALIBRATION: Final = 4
"""Inputs that quantization sees."""
LOST: Final = 0.5
"""Error of an int8 network of which no more can be said."""
OPSET: Final = 21
LEAST, SECONDS = 20, 15
"""Inputs that are compared at least, and processor seconds after which there are no more."""

Sample = Mapping[str, Any]


class Reader(CalibrationDataReader):  # type: ignore[misc] # it has no types
    """Gives samples to the quantizer."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.left = iter(samples)

    def get_next(self) -> Sample | None:
        return next(self.left, None)


def inputs_of(path: Path, count: int, dims: Mapping[str, int]) -> list[Sample]:
    """The inputs that lie beside a model, and random ones, together ``count``."""
    model = onnx.load(path)
    names = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim}
    given = path.with_suffix(".npz")
    real = list(islice(onnxamp.load_samples(given), count)) if given.exists() else []
    drawn = onnxamp.random_samples(model, count, dims={name: size for name, size in dims.items() if name in names})
    return [*real, *list(drawn)[len(real) :]]


def quantized(source: Path, folder: Path, samples: Sequence[Sample], way: Mapping[str, Any]) -> ModelProto | None:
    """The network in int8, per channel; None if nothing was quantized."""
    ready, result = folder / "ready.onnx", folder / "int8.onnx"
    quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
    quantize_static(
        str(ready),
        str(result),
        Reader(samples[:CALIBRATION]),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=way["op_types_to_quantize"],
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, "QuantizeBias": way["QuantizeBias"]},
    )
    model = onnx.load(result)
    return model if any(node.op_type == "QuantizeLinear" for node in model.graph.node) else None


def session(model: ModelProto) -> ort.InferenceSession:
    """Return a session that computes every node as it is, without fusing any."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def error(found: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]]) -> float:
    """The worst relative L2 error of a float output; lists of another length have none."""
    worst = 0.0
    for x, y in zip(found, wanted, strict=True):
        if y.dtype.kind == "f" and x.shape == y.shape:
            off, size = float(np.linalg.norm(x.astype(np.float64) - y)), float(np.linalg.norm(y))
            worst = max(worst, off / max(size, 1e-30))
    return worst


def allowed(quantized: Any) -> Any:
    """What a result may be off by, given the error of the quantized model."""
    return 1.1 * quantized + 2e-3


def compared(original: ModelProto, int8: ModelProto, samples: Sequence[Sample]) -> dict[str, Any]:
    """Both errors over all samples, and on how many single ones each model is off by more than the other allows."""
    low = emulate(onnxamp.convert_model(int8, "O2", target="tensorrt"))
    sessions, start = [session(model) for model in (original, int8, low)], time.process_time()
    rows = list[tuple[float, float]]()
    for sample in samples:
        wanted, before, after = (one.run(None, sample) for one in sessions)
        rows.append((error(before, wanted), error(after, wanted)))
        if len(rows) >= LEAST and time.process_time() - start > SECONDS:
            break
    errors = np.array(rows)
    first, second = (float(one) for one in np.sqrt((errors**2).mean(axis=0)))
    kind = "lost" if first >= LOST else "inside" if second <= allowed(first) else "outside"
    return {
        "int8": round(first, 4),
        "int8 and float16": round(second, 4),
        "kind": kind,
        "float16 is off by more": int(np.sum(errors[:, 1] > allowed(errors[:, 0]))),
        "int8 is off by more": int(np.sum(errors[:, 0] > allowed(errors[:, 1]))),
        "samples": len(errors),
    }


def rows(paths: Sequence[Path], ways: Sequence[str], count: int, dims: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """A row for each model and way of quantizing it."""
    for path in paths:
        with tempfile.TemporaryDirectory() as name:
            folder, samples = Path(name), inputs_of(path, count, dims)
            source = folder / "float32.onnx"
            original = onnxamp.convert_model(onnx.load(path), "O0", opset=OPSET)
            onnx.save(original, source)
            for way in ways:
                try:
                    int8 = quantized(source, folder, samples, WAYS[way])
                    if int8 is not None:
                        yield {"model": path.stem, "quantized": way, **compared(original, int8, samples)}
                except Exception as failure:  # noqa: BLE001 - the quantizer's, or of what it made
                    yield {"model": path.stem, "quantized": way, "kind": "fails", "why": str(failure)[:200]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", type=Path, nargs="*", help="more models; an .npz of inputs may lie beside each")
    parser.add_argument("--dims", nargs="*", default=[], metavar="NAME=SIZE", help="sizes of dynamic dimensions")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="three models, one way, and nothing is written")
    parser.add_argument("--check", action="store_true", help="exit code 1 if one is outside")
    options = parser.parse_args(arguments)
    models, dims = ROOT / "models", {name: int(size) for name, size in (text.split("=") for text in options.dims)}
    paths = sorted(path for folder in (models, models / "speech", *options.folders) for path in folder.glob("*.onnx"))
    if options.quick:
        paths = [models / f"{name}.onnx" for name in ("classifier", "encoder", "unet")]
    ort.set_default_logger_severity(4)
    table = list[dict[str, Any]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows(paths, list(WAYS)[: 1 if options.quick else None], options.samples, dims):
            table.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
    kinds = {kind: sum(row["kind"] == kind for row in table) for kind in ("inside", "outside", "lost", "fails")}
    judged = [row for row in table if row["kind"] in ("inside", "outside")]
    counts = {
        key: sum(row[key] for row in judged) for key in ("samples", "float16 is off by more", "int8 is off by more")
    }
    summary = {"networks": kinds, "single inputs": counts}
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    if not options.quick:
        text = json.dumps({"summary": summary, "rows": table}, indent=1)
        (ROOT / "benchmarks" / "results" / "int8.json").write_text(text + "\n", encoding="utf-8")
    if options.check and kinds["outside"]:
        raise SystemExit("A network is off by more than its int8 form allows.")


if __name__ == "__main__":
    main()
