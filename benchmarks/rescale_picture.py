"""The picture of the rescaling benchmark, as SVG: the range of every value, before and after."""

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any, Final

MOST: Final = 65504.0
"""float16's largest finite number."""

Facts = Mapping[str, Any]

WIDTH, PANEL, LEFT, GAP = 940, 150, 60, 36
"""Pixels: the picture, a model's panel, the space left of it, and that above."""
TOP, BOTTOM = 44, -20
"""Binary exponents at the edges of a panel."""
STYLE = """
    text { fill: #1f2937; font-size: 13px } .dim { fill: #64748b } .axis { stroke: #cbd5e1 }
    .fits { fill: #2563eb; opacity: 0.08 }
    .before { fill: #b91c1c } .after { fill: #2563eb } .strong { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb } .dim { fill: #94a3b8 } .axis { stroke: #475569 } .fits { fill: #60a5fa }
      .before { fill: #fca5a5 } .after { fill: #60a5fa }
    }
"""


def draw(rows: Sequence[Facts]) -> str:
    """The largest magnitude of every value, before and after, against what float16 holds."""
    height = len(rows) * (PANEL + GAP) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<title>The largest magnitude of every value, before and after rescaling, against float16's range</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, row in enumerate(rows):
        lines += _panel(row, number * (PANEL + GAP) + GAP)
    words = (
        "values in the order in which they are computed: red before, blue after; squares inside norms are folded away"
    )
    lines.append(f'<text class="dim" x="{LEFT}" y="{height - 10}">{words}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(row: Facts, top: int) -> list[str]:
    def at(size: float) -> float:
        exponent = max(BOTTOM, min(TOP, log2(size)))
        return round(top + (TOP - exponent) / (TOP - BOTTOM) * PANEL, 1)

    right, step = WIDTH - 10, (WIDTH - LEFT - 30) / max(len(row["ranges"]) - 1, 1)
    islands, rescaled = row["islands"], row["rescaled"]
    text = (
        f"Casts: {islands['casts']} → {rescaled['casts']}, float32 nodes: {len(islands['float32'])} →"
        f" {len(rescaled['float32'])},"
        f" error {rescaled['error']:.1e}"
    )
    lines = [
        f'<text class="strong" x="{LEFT}" y="{top - 8}">{row["model"]}</text>',
        f'<text class="dim" x="{right}" y="{top - 8}" text-anchor="end">{text}</text>',
        f'<rect class="fits" x="{LEFT}" y="{at(MOST)}" width="{right - LEFT}" height="{at(2.0**-14) - at(MOST):.1f}"/>',
    ]
    for size, label in ((2.0**40, "1e12"), (MOST, "65504"), (1.0, "1"), (2.0**-14, "6e-5")):
        lines.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{at(size)}" y2="{at(size)}"/>')
        lines.append(f'<text class="dim" x="{LEFT - 8}" y="{at(size) + 4}" text-anchor="end">{label}</text>')
    for place, sizes in enumerate(row["ranges"]):
        x = round(LEFT + 10 + place * step, 1)
        for kind, size in zip(("before", "after"), sizes, strict=True):
            if size is not None and (kind == "after" or size > MOST):
                lines.append(f'<circle class="{kind}" cx="{x}" cy="{at(size)}" r="2.2"/>')
    return lines
