"""What benchmarks/gpu.py measured, as a picture: how many times as fast as float32 each variant is.

python benchmarks/gpu_picture.py draws docs/gpu.svg anew from benchmarks/results/gpu.json.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

WIDTH, ROW, GROUP = 940, 20, 40
"""Pixels: the picture, a variant's row, and the heading of a network with the space above it."""
LEFT, BAR = 210, 480
"""Where bars begin, and how long the longest is."""
STYLE = """
    text { fill: #1f2937 } .dim { fill: #64748b } .axis { stroke: #cbd5e1; stroke-dasharray: 2 3 }
    .ours { fill: #2563eb } .peer { fill: #94a3b8 } .float32 { fill: #cbd5e1 } .strong { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb } .dim { fill: #94a3b8 } .axis { stroke: #475569 }
      .ours { fill: #60a5fa } .peer { fill: #64748b } .float32 { fill: #475569 }
    }
"""

Facts = Mapping[str, Any]


def draw(facts: Facts, reference: str) -> str:
    """A group of bars per network, at its largest batch; the reference's own bar is 1 long."""
    longest = max(times for subject in facts["subjects"] for _, times, _ in _rows(subject, reference))
    unit = BAR / longest
    parts = [_text(LEFT, 24, f"times as fast as {reference}, at the largest batch; milliseconds behind", "dim")]
    y = 24
    for subject in facts["subjects"]:
        y += GROUP
        title = f"{subject['title']}, batch {max(subject['batches'])} ({subject['date']})"
        parts.append(_text(16, y - 8, title, "strong"))
        rows = list(_rows(subject, reference))
        parts.append(f'<path class="axis" d="M{LEFT + unit:.1f} {y - 2}v{ROW * len(rows)}"/>')
        for row, times, milliseconds in rows:
            kind = "peer" if row["peer"] else "float32" if row["model"].startswith("float32") else "ours"
            parts.append(_text(LEFT - 10, y + 12, row["model"], "strong" if kind == "ours" else "", "end"))
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{y + 1}" width="{times * unit:.1f}" height="14" rx="3"/>')
            parts.append(_text(LEFT + times * unit + 8, y + 12, f"{times:.2f}×   {milliseconds:.2f} ms"))
            y += ROW
        for name, why in subject["missing"].items():
            parts.append(_text(16, y + 12, f"{name}: {_short(why)}", "dim"))
            y += ROW
    machine = facts["machine"]
    packages = machine["packages"]
    runtime = next((f"{name} {packages[name]}" for name in ("onnxruntime-gpu", "onnxruntime") if name in packages), "")
    parts.append(_text(16, y + 30, f"{machine['ran_on']}, {runtime}. Medians; inputs bound.", "dim"))
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 46}" font-family="system-ui, sans-serif"'
        f' font-size="13">\n  <style>{STYLE}  </style>\n  {body}\n</svg>\n'
    )


def _rows(subject: Facts, reference: str) -> Iterator[tuple[Facts, float, float]]:
    """Variants with their speed and milliseconds at the largest batch."""
    batch = max(subject["batches"])
    medians = {
        row["model"]: timing["latency"]["median"]
        for row in subject["variants"]
        for timing in row["timings"]
        if timing["batch"] == batch
    }
    for row in subject["variants"]:
        yield row, medians[reference] / medians[row["model"]], medians[row["model"]] * 1e3


def _short(why: str) -> str:
    """A reason in one line, without the path of the file that does not load."""
    text = why.partition(": ")[2] if why.startswith("ONNX Runtime could not load") else why
    return f"does not load: {text[:100]}..." if text is not why and len(text) > 100 else text[:110]


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    styled = f' class="{style}"' if style else ""
    return f'<text{styled} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    found = json.loads((root / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))
    first = found["subjects"][0]["variants"][0]["model"]
    (root / "docs" / "gpu.svg").write_text(draw(found, first), encoding="utf-8")
