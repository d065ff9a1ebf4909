"""What benchmarks/results/language_models.json says, as tables of the pages on language models.

python benchmarks/language_tables.py writes the tables of the pages anew.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks/results/language_models.json"
PAGES: Final = ROOT / "docs/how-to"
TITLES: Final = {
    "llama": "Llama",
    "qwen": "Qwen 3, with norms of queries and keys",
    "gemma": "Gemma 2, with values beyond 65504",
    "whisper": "Whisper",
}
SOFTWARE: Final = {"genai": "GenAI", "javascript": "transformers.js"}
TYPES: Final = {
    ("float32", "float16"): "float16",
    ("float32", "bfloat16"): "bfloat16",
    ("int4", "float16"): "q4f16",
}
"""Names of types, by the weights of the original and the type of the result."""
ANGLES: Final = {"Cast", "Concat", "Cos", "Expand", "MatMul", "Sin", "Transpose"}
"""Ops that compute rotary angles, which no low precision holds."""
ENDS: Final = {"gemma": {"Mul"}, "whisper": {"Identity", "LayerNormalization"}}
"""Ops that may give a float32 output in float32: those that end logits, and the last norm of an encoder."""
KL: Final = 1e-3

Facts = dict[str, Any]


def tables(facts: Facts) -> Iterator[tuple[str, str]]:
    """The name of a page, and a table on it."""
    rows = {(row["network"], row["kind"], row["weights"], row["step"]): row for row in facts["rows"]}
    yield "language-models", _kl(rows)
    for page, kind in (("genai", "genai"), ("transformers-js", "javascript")):
        yield page, _costs(rows, kind)
        yield page, _engine(rows, kind)
    yield "encoder-decoders", _whisper(rows)


def broken(facts: Facts) -> Iterator[str]:
    """What the results do not keep of what the pages promise."""
    for row in facts["rows"]:
        where = " ".join(row[name] for name in ("network", "kind", "weights", "step"))
        if "failure" in row:
            yield f"{where} failed"
        for model in row.get("models", ()):
            if model["outcome"] != "converted" or not (model["kl"] or 0.0) <= KL:
                yield f"{where}: {model['outcome']}, KL {model['kl']}"
            allowed = ANGLES | ENDS.get(row["network"], set()) if row["kind"] == "javascript" else set[str]()
            if not set(model["float32"]) <= allowed:
                yield f"{where}: float32 nodes {model['float32']}"
        if row["step"] == "engine" and not row.get("unpacked", row["kl"]) <= KL:
            yield f"{where}: KL {row['kl']}"


def _table(heads: str, lines: list[list[str]]) -> str:
    """A table in Markdown."""
    cells = heads.split(" | ")
    return "".join(f"| {' | '.join(line)} |\n" for line in (cells, ["---"] * len(cells), *lines)).replace(
        " --- ", "---"
    )


def _kl(rows: dict[Any, Facts]) -> str:
    lines = []
    for name, title in TITLES.items():
        cells = [
            _number(_decoder(rows[name, kind, weights, dtype])["kl"])
            for kind in SOFTWARE
            for weights, dtype in TYPES
            if (name, kind, weights, dtype) in rows
        ]
        before, after = _decoder(rows[name, "genai", "float32", "float16"])["bytes"]
        lines.append([title, *cells, f"{_mega(before)} → {_mega(after)} MB"])
    return _table("network | GenAI: float16 | bfloat16 | q4f16 | transformers.js: float16 | q4f16 | size", lines)


COSTS: Final = "relative L2 | KL, nats | top-1 | perplexity | same tokens | size, MB"


def _costs(rows: dict[Any, Facts], kind: str) -> str:
    lines = []
    for name, title in TITLES.items():
        for (weights, dtype), types in TYPES.items():
            if row := rows.get((name, kind, weights, dtype)):
                lines.append(["" if lines and types != "float16" else title, types, *_cost(_decoder(row))])
    return _table(f"network | type | {COSTS}", lines)


def _whisper(rows: dict[Any, Facts]) -> str:
    lines = []
    for kind, title in SOFTWARE.items():
        for (weights, dtype), types in TYPES.items():
            if row := rows.get(("whisper", kind, weights, dtype)):
                encoder = next(model for model in row["models"] if "encoder" in model["model"])
                cost = _cost(_decoder(row))
                lines.append(["" if types != "float16" else title, types, _number(encoder["error"]), *cost])
    return _table(f"folder for | type | encoder | {COSTS}", lines)


def _decoder(row: Facts) -> Facts:
    """The model that gives logits."""
    return next(model for model in row["models"] if model["kl"] is not None)


def _cost(model: Facts) -> list[str]:
    before, after = (model["perplexity"][name] for name in ("reference", "result"))
    top1 = f"{100 * model['top1']:.1f}".removesuffix(".0")
    sizes = " → ".join(map(_mega, model["bytes"]))
    numbers = [_number(model["error"]), _number(model["kl"]), f"{top1} %"]
    return [*numbers, f"{before:.1f} → {after:.1f}", str(model["same"]), sizes]


def _engine(rows: dict[Any, Facts], kind: str) -> str:
    """Divergence by ONNX Runtime's own kernels on the CPU."""
    pairs = (("float32", "float32 → float16"), ("int4", "int4 → q4f16"))
    lines = [
        ["" if weights == "int4" else title, types, _number(rows[name, kind, weights, "engine"]["kl"])]
        for name, title in TITLES.items()
        for weights, types in pairs
    ]
    return _table("network | types | KL, nats", lines)


def _number(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _mega(size: int) -> str:
    return f"{size / 1e6:.1f}"


def main() -> None:
    """Write the tables of all pages anew."""
    facts = json.loads(RESULTS.read_text(encoding="utf-8"))
    for page, table in tables(facts):
        path = PAGES / f"{page}.md"
        text = path.read_text(encoding="utf-8")
        start = text.index(table.splitlines(keepends=True)[0])
        path.write_text(text[:start] + table + text[text.index("\n\n", start) + 1 :], encoding="utf-8")
    sys.exit("\n".join(broken(facts)) or 0)


if __name__ == "__main__":
    main()
