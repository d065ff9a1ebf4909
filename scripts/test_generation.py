"""Convert folders of language models, and generate with the software that they are for.

python3 scripts/test_generation.py

Packages go to build/generation: onnxamp as it is here, and onnxruntime-genai. transformers.js, which runs in Node on
the CPU, is used where `npm install --prefix build/npm @huggingface/transformers` has put it.
The decoders are those of the tests, in float32 and with weights of 4 bits. Each folder is converted with one command,
without options. Then tokens are generated from both folders and compared, and a thousand are generated from the result.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bootstrap import BIN, ROOT, Environment, ensure

HOME = ROOT / "build" / "generation"
KL = 1e-3
"""Nats between the distributions of the next token, at most."""
TOKENS, MANY = 40, 1000
TRANSFORMERS = ROOT / "build/npm/node_modules/@huggingface/transformers/dist/transformers.node.mjs"
PROMPT = (3, 14, 15, 9, 26)

GENAI = """
import json, sys
import numpy as np
import onnxruntime_genai as genai

folder, count, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = genai.Model(folder)
params = genai.GeneratorParams(model)
length = len(prompt) + count
params.set_search_options(max_length=length + 1, min_length=length, do_sample=False)  # the end never comes
generator = genai.Generator(model, params)
generator.append_tokens(prompt)
logits = generator.get_logits().reshape(-1).tolist()
tokens, finite = [], True
for _ in range(count):
    finite = finite and not np.isnan(generator.get_logits()).any()
    generator.generate_next_token()
    tokens.append(int(generator.get_next_tokens()[0]))
print(json.dumps({"logits": logits, "tokens": tokens, "finite": bool(finite)}))
"""
"""Greedy generation by onnxruntime-genai: the logits after the prompt, the tokens, and whether no logit was NaN."""

DIVERGENCE = """
import json, sys
import numpy as np

rows = np.array(json.loads(sys.argv[1]))
rows -= rows.max(axis=-1, keepdims=True)
before, after = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
print((np.exp(before) * (before - after)).sum())
"""
"""KL divergence, in nats, between the distributions that two rows of logits stand for."""

JAVASCRIPT = ROOT / "tests" / "transformers_js.mjs"


def output(*command: object) -> str:
    """What a command prints; a failure ends the script."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:300]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def install() -> Environment:
    """An environment with this onnxamp, ONNX Runtime and GenAI."""
    environment = Environment(HOME / "venv")
    if not environment.python.exists():
        output(sys.executable, "-m", "venv", environment.path)
    pip = (environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    output(*pip, "--editable", f"{ROOT}[cpu]", "onnxruntime-genai>=0.11")
    return environment


def write(kind: str, folder: Path, *, int4: bool) -> None:
    """Write a folder with one of the decoders of the tests."""
    shutil.rmtree(folder, ignore_errors=True)
    is_web = kind == "transformers.js"
    model = "plain()" if is_web and not int4 else f"grouped(int4={int4})"
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tests")!r})
import decoders
home = decoders.folder(Path({str(folder)!r}), {kind!r}, decoders.{model})
if {is_web and int4}:
    (home / "onnx/model.onnx").rename(home / "onnx/model_q4.onnx")
"""
    output(BIN / "python", "-c", code)


def convert(environment: Environment, folder: Path) -> Path:
    """Convert a folder with one command, and see that it was validated."""
    target = folder.with_name(f"{folder.name}-low")
    shutil.rmtree(target, ignore_errors=True)
    printed = output(environment.bin / "onnxamp", "convert", folder, "-o", target)
    assert "1 converted." in printed, printed
    assert "not validated" not in printed, printed
    return target


def same_tokens(one: Sequence[float], other: Sequence[float]) -> int:
    """How many tokens two generations share, place by place."""
    return sum(a == b for a, b in zip(one, other, strict=True))


def test_genai(environment: Environment, *, int4: bool) -> None:
    """GenAI generates with the result as with the original."""
    folder = HOME / f"genai-{'int4' if int4 else 'float32'}"
    write("genai", folder, int4=int4)
    target = convert(environment, folder)

    def generate(home: Path, count: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = json.loads(
            output(environment.python, "-c", GENAI, home, count, json.dumps(PROMPT))
        )
        return found

    original, result, long = generate(folder, TOKENS), generate(target, TOKENS), generate(target, MANY)
    divergence = float(output(environment.python, "-c", DIVERGENCE, json.dumps([original["logits"], result["logits"]])))
    same = same_tokens(original["tokens"], result["tokens"])
    print(
        f"{folder.name}: KL {divergence:.1e}, {same} of {TOKENS} tokens are the same, {len(long['tokens'])} generated"
    )
    assert divergence <= KL
    assert long["finite"]
    assert len(long["tokens"]) == MANY
    assert int4 or same == TOKENS, "tokens differ"  # with 8 bits on the CPU they may


def test_javascript(environment: Environment, *, int4: bool) -> None:
    """transformers.js generates with the result in Node; in float32 the same tokens as before."""
    folder = HOME / f"javascript-{'int4' if int4 else 'float32'}"
    write("transformers.js", folder, int4=int4)
    target = convert(environment, folder)

    def generate(home: Path, file: str, count: int) -> list[int]:
        question = {
            "library": TRANSFORMERS.resolve().as_uri(),
            "home": str(home.parent),
            "folder": home.name,
            "file": file,
            "tokens": PROMPT,
            "count": count,
        }
        answer = json.loads(output("node", JAVASCRIPT, json.dumps(question)))
        assert answer["nans"] == 0, f"{home.name}: logits hold NaN"
        tokens: list[int] = answer["tokens"]
        return tokens

    before, after = ("model_q4", "model_q4f16") if int4 else ("model", "model_fp16")
    same = same_tokens(generate(folder, before, TOKENS), generate(target, after, TOKENS))
    count = len(generate(target, after, MANY))
    print(f"{folder.name}: {same} of {TOKENS} tokens are the same in transformers.js, {count} generated")
    assert count == MANY
    assert int4 or same == TOKENS, "tokens differ"  # with 8 bits on the CPU they may


if __name__ == "__main__":
    ensure("dev")
    HOME.mkdir(parents=True, exist_ok=True)
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    installed = install()
    for int4 in (False, True):
        test_genai(installed, int4=int4)
    if shutil.which("node") is None or not TRANSFORMERS.is_file():
        print("transformers.js is left out: it is not installed, or Node is not")
        sys.exit()
    for int4 in (False, True):
        test_javascript(installed, int4=int4)
