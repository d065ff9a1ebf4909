"""Folders of language models: what float16 and bfloat16 cost.

python benchmarks/language_models.py [--cache FOLDER] [--out FILE] [--only NAME ...] [--steps STEP ...] [--seconds S]
                                     [--builder PYTHON] [--optimum PYTHON]

Four networks of random weights are exported for ONNX Runtime GenAI (by its model builder) and for transformers.js (by
Optimum and ONNX Runtime's quantizer), in float32 and with weights of 4 bits (language_exports.py, which says what both
Pythons need). Each step converts a folder or compares its logits, and adds a row to the file at once. A step that the
file has, measured with the same versions, is not repeated, so the benchmark continues where it stopped.

Needs onnxamp[cpu,text].
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnxruntime as ort
from measure import machine

from onnxamp import Prompts

ROOT: Final = Path(__file__).resolve().parents[1]
EXPORTS: Final = Path(__file__).with_name("language_exports.py")
RESULTS: Final = ROOT / "benchmarks/results/language_models.json"
NETWORKS: Final = ("llama", "qwen", "gemma", "whisper")
KINDS: Final = ("genai", "javascript")
WEIGHTS: Final = ("float32", "int4")
STEPS: Final = ("convert", "float16", "bfloat16", "engine")
"""Convert without options, and with prompts to a type; compare logits in ONNX Runtime as it computes on the CPU."""


class CommandError(Exception):
    """A command failed; the text says why."""


class Step(NamedTuple):
    """One measurement of a folder; it is a row of the results."""

    network: str
    kind: str
    weights: str
    step: str

    @property
    def folder(self) -> str:
        """The name of the folder."""
        return f"{self.kind}-{self.network}-{self.weights}"


def steps(networks: tuple[str, ...], wanted: tuple[str, ...]) -> Iterator[Step]:
    """All steps in order: transformers.js has no bfloat16."""
    for network in networks:
        for kind in KINDS:
            for weights in WEIGHTS:
                has_bfloat16 = kind == "genai" and weights == "float32"
                for step in wanted:
                    if step != "bfloat16" or has_bfloat16:
                        yield Step(network, kind, weights, step)


def called(*command: object) -> str:
    """What a command prints.

    Raises:
        CommandError: it fails.
    """
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-1500:]
        raise CommandError(f"{' '.join(map(str, command))[-300:]} ended with {done.returncode}: {said}")
    return done.stdout


def reported(*arguments: object) -> dict[str, Any]:
    """What a command of onnxamp reports."""
    report: dict[str, Any] = json.loads(called(sys.executable, "-m", "onnxamp", *arguments, "--format", "json"))
    return report


def converted(folder: Path, target: Path, *options: object) -> Iterator[dict[str, Any]]:
    """Convert a folder, and yield what is known of each model."""
    shutil.rmtree(target, ignore_errors=True)
    report = reported("convert", folder, "-o", target, *options)["report"]
    for row in report["rows"]:
        logits = next((one for one in row["outputs"] if one["name"] == "logits"), {})
        yield {
            "model": row["name"],
            "outcome": row["outcome"],
            "casts": row["casts"],
            "float32": _float32(target, row["name"]) if row["outcome"] == "converted" else {},
            "bytes": [row["bytes_before"], row["bytes_after"]],
            "inputs": row["inputs"],
            "error": row["error"],
            "kl": logits.get("kl_divergence"),
            "top1": logits.get("argmax_agreement"),
            "perplexity": row["perplexity"],
            "same": sum(text["same"] for text in row["tokens"]),
        }


def _float32(folder: Path, name: str) -> dict[str, int]:
    """Float32 nodes of a result by type of op, except constants."""
    stem = Path(name).stem
    home = (folder / name).parent
    names = (f"{stem}{suffix}.onnx" for suffix in ("_fp16", "f16", ""))
    path = next(path for one in names if (path := home / one).exists())
    found = reported("inspect", path)["operators"]
    return {
        op.removesuffix(" float32"): count
        for op, count in found.items()
        if op.endswith(" float32") and op != "Constant float32"
    }


def exported(step: Step, given: argparse.Namespace) -> Path:
    """The folder that a step needs, which is exported if it is missing."""
    folder: Path = given.cache / step.folder
    if not folder.exists():
        python = given.builder if step.kind == "genai" else given.optimum
        called(python, EXPORTS, step.kind, step.network, step.weights, given.cache)
    return folder


def measured(step: Step, given: argparse.Namespace) -> dict[str, Any]:
    """What a step measures."""
    folder = exported(step, given)
    low = folder.with_name(f"{folder.name}-low")
    if step.step == "convert":
        return {"models": list(converted(folder, low))}
    if step.step in ("float16", "bfloat16"):
        texts = given.cache / f"{step.network}.txt"
        if not texts.exists():
            called(given.builder, EXPORTS, "prompts", step.network, "float32", given.cache)
        target = folder.with_name(f"{folder.name}-{step.step}")
        return {"models": list(converted(folder, target, "--prompts", texts, "--dtype", step.step))}
    if not low.exists():
        list(converted(folder, low))
    return diverged(_decoder(folder), _decoder(low), given.cache / f"{step.network}.txt")


def _decoder(folder: Path) -> Path:
    """The file of the model that gives logits."""
    return next(path for path in sorted(folder.rglob("*.onnx")) if "encoder" not in path.name)


def diverged(original: Path, result: Path, texts: Path) -> dict[str, Any]:
    """How far apart next tokens are after each token of some texts, in ONNX Runtime on the CPU.

    Where that is far, "unpacked" is the divergence without prepacked weights: ONNX Runtime 1.32 packs those of 4 bits
    wrongly for float16 in branches.
    """
    found = _compared(original, result, texts, packs=True)
    return found if found["kl"] <= FAR else found | {"unpacked": _compared(original, result, texts, packs=False)["kl"]}


FAR: Final = 1e-3


def _compared(original: Path, result: Path, texts: Path, *, packs: bool) -> dict[str, float]:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", str(int(not packs)))
    sessions = [ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in (original, result)]
    found = []
    for sample in list(Prompts(texts).samples_of(original))[::2]:  # without steps
        before, after = (_logs(session, sample) for session in sessions)
        divergence = (np.exp(before) * (before - after)).sum(axis=-1)
        found.append((divergence.mean(), (before.argmax(axis=-1) == after.argmax(axis=-1)).mean()))
    kl, top1 = np.mean(found, axis=0).tolist()
    return {"kl": kl, "top1": top1}


def _logs(session: ort.InferenceSession, sample: Any) -> Any:
    """Logarithms of the probabilities of next tokens."""
    low = {item.name for item in session.get_inputs() if item.type == "tensor(float16)"}
    feeds = {name: value.astype(np.float16) if name in low else value for name, value in sample.items()}
    logits = session.run(["logits"], feeds)[0].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def versions(given: argparse.Namespace) -> dict[str, str]:
    """The versions of everything that rows depend on, but the versions that rows name."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = {"Python": platform.python_version()}
    found |= {name: version(name) for name in ("numpy", "onnx", "onnxruntime")}
    builder = called(given.builder, "-c", code, "onnxruntime-genai", "torch", "transformers").split()
    optimum = called(given.optimum, "-c", code, "optimum-onnx", "torch", "transformers").split()
    found["model builder"], found["Optimum"] = builder[0], optimum[0]
    found["torch"], found["transformers"] = f"{builder[1]}, {optimum[1]}", f"{builder[2]}, {optimum[2]}"
    return found


def main() -> None:
    """Measure all steps that the file lacks, and write it anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/onnxamp-benchmarks/language-models")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--builder", default=sys.executable, help="Python that runs GenAI's model builder")
    parser.add_argument("--optimum", default=sys.executable, help="Python that has Optimum")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no step after this time")
    parser.add_argument("--again", action="store_true", help="repeat the chosen steps")
    given = parser.parse_args()
    given.cache = given.cache.absolute()
    given.cache.mkdir(parents=True, exist_ok=True)
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    start, about = time.monotonic(), {"machine": machine(), "versions": versions(given)}
    kept = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    same = kept.get("versions") == about["versions"]
    rows = {Step(*(row[name] for name in Step._fields)): row for row in kept["rows"]} if same else {}
    chosen = [*steps((*given.only,), (*given.steps,))]
    for step in chosen:
        if "failure" not in rows.get(step, {"failure": ""}) and not given.again:
            continue
        if time.monotonic() - start > given.seconds:
            sys.exit("Time is up; the same command continues here.")
        begun = time.monotonic()
        try:
            found = measured(step, given)
        except CommandError as failure:
            found = {"failure": str(failure)}
        rows[step] = {**step._asdict(), **found, "took": round(time.monotonic() - begun, 1)}
        sys.stderr.write(f"{json.dumps(rows[step])[:600]}\n")
        inorder = [rows[one] for one in steps(NETWORKS, STEPS) if one in rows]
        given.out.write_text(json.dumps(about | {"rows": inorder}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
