"""Folders of language models: what float16 and bfloat16 cost, and whether a thousand tokens are generated without NaN.

python benchmarks/language_models.py [--cache FOLDER] [--out FILE] [--only NAME ...] [--providers cpu browser]
                                     [--builder PYTHON] [--optimum PYTHON] [--generation-only]

Four networks of random weights are exported for ONNX Runtime GenAI (by its model builder) and for transformers.js (by
Optimum and ONNX Runtime's quantizer), in float32 and with weights of 4 bits (language_exports.py, which says what both
Pythons need). Each folder is converted with one command without options, and again with prompts that the network itself
sampled. Then both folders generate, on every engine that takes them; in a browser the result alone does. Needs
onnxamp[cpu,genai,text], and transformers.js and Chromium where tests find them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
EXPORTS: Final = Path(__file__).with_name("language_exports.py")
MANY: Final = 1000
WHISPER_POSITIONS: Final = 448
"""As many tokens as Whisper has places for."""
NETWORKS: Final = ("llama", "qwen", "gemma", "whisper")
WEIGHTS: Final = ("float32", "int4")
PROGRAM: Final = ROOT / "tests" / "web.py"
"""The command line where npm packages are found and Chromium has software Vulkan."""


def called(*command: object) -> str:
    """What a command prints; a failure ends the benchmark."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[-300:]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def reported(*arguments: object) -> dict[str, Any]:
    """The report of a command of onnxamp."""
    printed = called(sys.executable, PROGRAM, *arguments, "--format", "json")
    report: dict[str, Any] = json.loads(printed)["report"]
    return report


def converted(folder: Path, target: Path, *options: object) -> Iterator[dict[str, Any]]:
    """Convert a folder, and yield what is known of each model."""
    shutil.rmtree(target, ignore_errors=True)
    for row in reported("convert", folder, "-o", target, *options)["rows"]:
        logits = next((one for one in row["outputs"] if one["name"] == "logits"), {})
        yield {
            "model": row["name"],
            "outcome": row["outcome"],
            "casts": row["casts"],
            "bytes": [row["bytes_before"], row["bytes_after"]],
            "error": row["error"],
            "kl": logits.get("kl_divergence"),
            "top1": logits.get("argmax_agreement"),
            "perplexity": row["perplexity"],
            "tokens": row["tokens"],
        }


def measured(name: str, kind: str, weights: str, home: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Convert a folder in all ways, and let both generate; yield a row of results for each."""
    folder, texts = home / f"{kind}-{name}-{weights}", home / f"{name}.txt"
    pythons = {"genai": given.builder, "javascript": given.optimum}
    if not folder.exists():
        called(pythons[kind], EXPORTS, kind, name, weights, home)
    if not (texts.exists() or given.generation_only):
        called(given.builder, EXPORTS, "prompts", name, "float32", home)
    about = {"network": name, "kind": kind, "weights": weights}
    target = folder.with_name(f"{folder.name}-low")
    yield about | {"how": "without options", "models": list(converted(folder, target))}
    types = ("float16", "bfloat16") if (kind, weights) == ("genai", "float32") else ("float16",)
    for dtype in () if given.generation_only else types:
        other = folder.with_name(f"{folder.name}-{dtype}")
        models = list(converted(folder, other, "--prompts", texts, "--dtype", dtype))
        yield about | {"how": f"{dtype}, with prompts", "models": models}
    length = 8
    count = WHISPER_POSITIONS - length if name == "whisper" else MANY
    for provider in given.providers if kind == "javascript" else ("cpu",):
        quick = ("--tokens", count, "--seconds", 0.1, "--provider", provider, "--threads", 1)
        homes = (target,) if provider == "browser" else (folder, target)  # software Vulkan is slow
        report = reported("bench", *homes, *quick, "--dim", f"{LENGTHS.get((name, kind), LENGTH)}={length}")
        yield about | {"how": f"generated on {provider}", "ran_on": report["ran_on"], "runs": report["runs"]}


LENGTH: Final = "sequence_length"
LENGTHS: Final = {("whisper", "javascript"): "decoder_sequence_length"}
"""What exporters call the length of a prompt."""


def main() -> None:
    """Measure, and write the results anew after each folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/onnxamp-benchmarks/language-models")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/language_models.json")
    parser.add_argument("--builder", default=sys.executable, help="Python that runs GenAI's model builder")
    parser.add_argument("--optimum", default=sys.executable, help="Python that has Optimum")
    parser.add_argument("--generation-only", action="store_true", help="leave out the conversions with prompts")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--providers", nargs="+", choices=("cpu", "browser"), default=["cpu", "browser"])
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    rows: list[dict[str, Any]] = []
    for name in given.only:
        for kind in ("genai", "javascript"):
            for weights in WEIGHTS:
                for row in measured(name, kind, weights, given.cache, given):
                    rows.append(row)
                    sys.stderr.write(f"{json.dumps(row)[:400]}\n")
                    given.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
