"""Convert folders of language models, and generate with the software that they are for.

python3 scripts/test_generation.py

Packages go to build/generation: onnxamp as it is here, onnxruntime-genai, and, where npm is installed, transformers.js,
which runs in Node on the CPU and in Chromium on WebGPU.
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

JAVASCRIPT = """
import { AutoModelForCausalLM, Tensor, env } from '@huggingface/transformers';
const [home, folder, dtype, count, prompt] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = home;
const model = await AutoModelForCausalLM.from_pretrained(folder, { dtype, local_files_only: true });
const ids = JSON.parse(prompt).map(BigInt);
const tensor = (values) => new Tensor('int64', BigInt64Array.from(values), [1, ids.length]);
const output = await model.generate({
  inputs: tensor(ids), attention_mask: tensor(ids.map(() => 1n)), do_sample: false,
  max_new_tokens: Number(count), min_new_tokens: Number(count),
});
console.log(JSON.stringify(output.tolist()[0].slice(ids.length).map(Number)));
"""
"""Greedy generation by transformers.js."""


def output(*command: object, cwd: Path | None = None) -> str:
    """What a command prints; a failure ends the script."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
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


def install_javascript() -> bool:
    """Whether transformers.js is there, or could be installed."""
    if shutil.which("npm") is None:
        return False
    folder = HOME / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generate.mjs").write_text(JAVASCRIPT)
    # Scripts of packages would fetch CUDA's libraries.
    output(
        "npm",
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "@huggingface/transformers@^4",
        cwd=folder,
    )
    return True


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
    benched = output(environment.bin / "onnxamp", "bench", folder, target, "--seconds", 0.5, "--format", "json")
    for run in json.loads(benched)["report"]["runs"]:
        print(f"{folder.name}: {run['runtime']} generates {run['decode']:.0f} tokens per second with {run['model']}")
    assert {run["runtime"].split()[0] for run in json.loads(benched)["report"]["runs"]} == {
        "onnxruntime",
        "onnxruntime-genai",
    }
    assert long["finite"]
    assert len(long["tokens"]) == MANY
    assert int4 or same == TOKENS, "tokens differ"  # with 8 bits on the CPU they may


def test_javascript(environment: Environment, *, int4: bool) -> None:
    """transformers.js generates with the result, in Node and in Chromium; in float32 the same tokens as before."""
    folder = HOME / f"javascript-{'int4' if int4 else 'float32'}"
    write("transformers.js", folder, int4=int4)
    target = convert(environment, folder)

    def generate(home: Path, dtype: str, count: int) -> list[int]:
        arguments = (HOME, home.name, dtype, count, json.dumps(PROMPT))
        printed = output("node", "generate.mjs", *arguments, cwd=HOME / "npm")
        tokens: list[int] = json.loads(printed.splitlines()[-1])
        return tokens

    before, after = ("q4", "q4f16") if int4 else ("fp32", "fp16")
    original, result = generate(folder, before, TOKENS), generate(target, after, TOKENS)
    same = same_tokens(original, result)
    print(f"{folder.name}: {same} of {TOKENS} tokens are the same")
    assert len(generate(target, after, MANY)) == MANY
    assert int4 or same == TOKENS, "tokens differ"
    trouble = browser_trouble()
    if trouble is not None:
        print(f"{folder.name}: not run on WebGPU: {trouble}")
        return
    arguments = (HOME, target.name, after, TOKENS, json.dumps(PROMPT))
    found = json.loads(output(BIN / "python", ROOT / "scripts" / "generate_in_chromium.py", *arguments))
    same = same_tokens(original, found)
    print(f"{folder.name}: {same} of {TOKENS} tokens are the same on WebGPU in Chromium")
    assert int4 or same == TOKENS, "tokens differ on WebGPU"


def browser_trouble() -> str | None:
    """Why nothing can run in a browser with float16 here; None if it can."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import web; print(web.browser_trouble() or '')"
    return output(BIN / "python", "-c", code).strip() or None


if __name__ == "__main__":
    ensure("dev")
    HOME.mkdir(parents=True, exist_ok=True)
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    installed = install()
    for int4 in (False, True):
        test_genai(installed, int4=int4)
    if install_javascript():
        for int4 in (False, True):
            test_javascript(installed, int4=int4)
    else:
        print("npm is not installed: transformers.js is left out")
