"""The results as text and as a picture.

python benchmarks/picture.py draws docs/benchmark.svg anew from benchmarks/results/convert.json.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from math import log10
from typing import Any

from checks import scaling
from tools import ROOT

Facts = Mapping[str, Any]

WIDTH, ROW, GROUP = 940, 22, 42
"""Pixels: the picture, a tool's row, and the heading of a model with the space above it."""
LEFT, BAR = 190, 330
"""Where bars begin, and how long the longest is."""
COLUMNS = (("memory", 720), ("Casts added", 815), ("error", 925))
"""Headings of the columns behind the bars, and where they end."""
STYLE = """
    text { fill: #1f2937 } .dim { fill: #64748b } .axis { stroke: #cbd5e1 }
    .ours { fill: #2563eb } .peer { fill: #94a3b8 } .none { fill: none; stroke: #94a3b8; stroke-dasharray: 3 3 }
    .bad { fill: #b91c1c } .strong { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb } .dim { fill: #94a3b8 } .axis { stroke: #475569 }
      .ours { fill: #60a5fa } .peer { fill: #64748b } .none { stroke: #64748b } .bad { fill: #fca5a5 }
    }
"""


def table(facts: Facts) -> str:
    """Ratios first; then what was measured."""
    lines = ["", "times as long as onnxamp:"]
    for row in facts["models"]:
        ratios = (f"{name} {_ratio(tool)}" for name, tool in row["tools"].items() if name != "onnxamp")
        lines.append(f"  {row['model']:10} {'   '.join(ratios)}")
    ratio = scaling({row["model"]: row for row in facts["models"]})
    lines += [f"  ten times the nodes take onnxamp {ratio:.1f} times as long"] if ratio else []
    header = ("seconds", "spread", "process", "peak MB", "anon MB", "Casts", "MB", "loads", "error")
    for row in facts["models"]:
        lines += ["", f"{row['title']}: {row['nodes']:,} nodes, {row['bytes'] / 1e6:,.1f} MB"]
        lines.append(f"  {'':21}" + "".join(f"{text:>14}" for text in header))
        lines += (f"  {name:21}" + "".join(_cells(tool)) for name, tool in row["tools"].items())
    lines += [f"{name} is not available: {why}" for name, why in facts["not_available"].items()]
    return "\n".join(lines) + "\n"


def _ratio(tool: Facts) -> str:
    return f"{tool['times_onnxamp']:.1f}" if "times_onnxamp" in tool else f"({tool.get('failure', 'no result')})"


def _cells(tool: Facts) -> Iterator[str]:
    if "failure" in tool:
        yield f"  {tool['failure']}"
        return
    low, high = tool["seconds_spread"]
    cells = [f"{tool['seconds']:.2f}", f"{low:.2f}-{high:.2f}", f"{tool['process']:.2f}"]
    cells += [f"{tool[name] / 1e6:,.0f}" if name in tool else "" for name in ("peak", "anonymous")]
    if "casts_added" in tool:
        cells += [
            f"{tool['casts_added']:,}",
            f"{tool['bytes'] / 1e6:,.1f}",
            "yes" if tool["loads"] else "no",
            _error(tool),
        ]
    yield from (f"{cell:>14}" for cell in cells)


def _error(tool: Facts) -> str:
    if not tool.get("loads", True):
        return "does not load"
    error = tool.get("error")
    return f"{error:.1e}" if isinstance(error, float) else str(error or "")


def draw(facts: Facts) -> str:
    """Bars of seconds on a logarithmic scale, a group per model; peak memory, Casts and error beside them."""
    times = [tool["seconds"] for row in facts["models"] for tool in row["tools"].values() if "seconds" in tool]
    low, high = log10(min(times)) - 0.15, log10(max(*times, facts["limit"]))
    titles = {name: tool["title"] for name, tool in facts["tools"].items()} | {"cp": "cp of the data file"}
    parts, y = [], 30
    for heading, right in COLUMNS:
        parts.append(_text(right, y, heading, "dim", "end"))
    parts.append(_text(LEFT, y, "seconds to load, convert and save (logarithmic), × onnxamp's", "dim"))
    for row in facts["models"]:
        y += GROUP
        size = f"{row['bytes'] / 1e9:.1f} GB" if row["bytes"] >= 1e9 else f"{row['bytes'] / 1e6:.0f} MB"
        parts.append(_text(16, y - 8, f"{row['title']}: {row['nodes']:,} nodes, {size}", "strong"))
        for name, tool in row["tools"].items():
            parts += _row(y, name == "onnxamp", titles[name], tool, lambda t: BAR * (log10(t) - low) / (high - low))
            y += ROW
    for name, why in facts["not_available"].items():
        y += ROW
        parts.append(_text(16, y, f"{titles[name]} is not available: {why}", "dim"))
    y += 26
    found = facts["machine"]
    rounds = max(tool.get("runs", 0) for row in facts["models"] for tool in row["tools"].values())
    medians = f"Medians of {rounds} runs" if rounds > 1 else "One run"
    note = f"{found['cores']} cores of {found['processor']}, {found['memory'] / 2**30:.0f} GiB. {medians}."
    parts.append(
        _text(
            16,
            y,
            f"{note} Memory: peak of anonymous bytes. Error: relative L2, every low-precision value rounded.",
            "dim",
        )
    )
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" font-family="system-ui, sans-serif"'
        f' font-size="13">\n  <style>{STYLE}  </style>\n  {body}\n</svg>\n'
    )


def _row(y: int, ours: bool, title: str, tool: Facts, length: Any) -> Iterator[str]:
    yield _text(LEFT - 10, y + 12, title, "strong" if ours else "", "end")
    if "failure" in tool:
        stopped = tool["failure"].startswith("stopped")
        yield f'<rect class="none" x="{LEFT}" y="{y + 1}" width="{BAR if stopped else 4}" height="14" rx="3"/>'
        text = tool["failure"] if len(tool["failure"]) < 90 else f"{tool['failure'][:87]}..."
        yield _text(LEFT + (BAR if stopped else 4) + 8, y + 12, text, "bad")
        return
    wide = max(3.0, length(tool["seconds"]))
    yield f'<rect class="{"ours" if ours else "peer"}" x="{LEFT}" y="{y + 1}" width="{wide:.1f}" height="14" rx="3"/>'
    times = "" if ours or "times_onnxamp" not in tool else f"  ×{tool['times_onnxamp']:.1f}"
    yield _text(LEFT + wide + 8, y + 12, f"{tool['seconds']:.2f} s{times}", "strong" if ours else "")
    cells = (f"{tool['anonymous'] / 1e6:,.0f} MB" if tool.get("anonymous") else "", "", "")
    if "casts_added" in tool:
        cells = (cells[0], f"{tool['casts_added']:,}", _error(tool))
    good = not isinstance(tool.get("verdict"), str) or tool["verdict"] == "within limits"
    for (heading, right), cell in zip(COLUMNS, cells, strict=True):
        yield _text(right, y + 12, cell, "bad" if heading == "error" and not good else "", "end")


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{kind}{place}>{escape(text)}</text>'


if __name__ == "__main__":
    found = json.loads((ROOT / "benchmarks" / "results" / "convert.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "benchmark.svg").write_text(draw(found), encoding="utf-8")
