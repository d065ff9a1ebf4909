"""Draw the graphs of docs/explain/graphs as onnxamp decides them at O2 float16: an SVG beside each .onnxtxt file.

.venv/bin/python scripts/draw_graphs.py [--out FOLDER]

The same graphs and decisions give the same bytes.
"""

import argparse
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from onnx import GraphProto, TensorProto, parser, shape_inference

import onnxamp

GRAPHS = Path(__file__).resolve().parent.parent / "docs" / "explain" / "graphs"

TARGETS = {"product": "webgpu", "accumulator": "webgpu", "attention": "cuda@1.26", "quantized": "openvino"}
"""Graphs that are drawn as they are decided for another target than CUDA."""

COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 134, 66, 98, 40, 16
STYLE = """
    .low { fill: #dbeafe; stroke: #2563eb } .high { fill: #fef3c7; stroke: #b45309 }
    .none { fill: #f1f5f9; stroke: #64748b } .hazard { fill: #fee2e2; stroke: #dc2626; stroke-width: 2 }
    .edge { stroke: #64748b; stroke-width: 1.4; fill: none } .cast { fill: #dc2626 }
    text { fill: #0f172a; font-size: 13px } .note { fill: #475569; font-size: 11px }
"""
LEGEND = (
    ("low", "low precision"),
    ("high", "float32"),
    ("hazard", "float32: hazard"),
    ("none", "no floats"),
)
FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def draw(path: Path) -> str:
    """The picture of a graph in ONNX's text syntax."""
    model = parser.parse_model(path.read_text(encoding="utf-8"))
    graph = model.graph
    plan = onnxamp.plan_model(str(path), "O2", target=TARGETS.get(path.stem, "cuda"), fold=False)
    typed = shape_inference.infer_shapes(model).graph
    floats = {item.name for item in (*typed.value_info, *typed.output) if item.type.tensor_type.elem_type in FLOATS}
    kinds = {node.name: "high" if floats.intersection(node.output) else "none" for node in graph.node}
    kinds |= {row.node: "low" for row in plan.rows if row.low and row.node in kinds}
    kinds |= {hazard.node: "hazard" for hazard in plan.hazards if not hazard.low}
    kinds |= {item.name: "high" if item.type.tensor_type.elem_type in FLOATS else "none" for item in graph.input}
    places = arrange(graph)
    width = max(x for x, _ in places.values()) + WIDTH + MARGIN
    bottom = max(y for _, y in places.values()) + HEIGHT + 34
    body = [*edges(graph, kinds, places), *boxes(graph, kinds, places), *legend(bottom)]
    width, height = max(width, 560), bottom + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="system-ui, sans-serif">\n  <style>{STYLE}  </style>\n'
        f'  <rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>\n  ' + "\n  ".join(body) + "\n</svg>\n"
    )


def arrange(graph: GraphProto) -> dict[str, tuple[int, int]]:
    """Top left corners of inputs and nodes by name, in columns by the longest path that leads there.

    A value that passes a column has a place there too: "value@column".
    """
    producer = {item.name: item.name for item in graph.input}
    column = dict.fromkeys(producer, 0)
    for node in graph.node:
        column[node.name] = 1 + max((column[producer[value]] for value in node.input if value in producer), default=0)
        producer |= dict.fromkeys(node.output, node.name)
    readers = defaultdict(list)
    for node in graph.node:
        for value in node.input:
            readers[producer.get(value)].append(column[node.name])
    for item in graph.input:  # beside their first reader
        column[item.name] = min(readers[item.name]) - 1
    names = defaultdict(list)
    for node in graph.node:
        names[column[node.name]].append(node.name)
    for name in sorted({*producer.values()}, key=lambda name: column[name]):
        for index in range(column[name] + 1, max(readers[name], default=0)):
            names[index].append(f"{name}@{index}")
    for item in graph.input:
        names[column[item.name]].append(item.name)
    return {
        name: (MARGIN + COLUMN * index, MARGIN + ROW * row)
        for index, column_names in names.items()
        for row, name in enumerate(column_names)
    }


def edges(graph: GraphProto, kinds: Mapping[str, str], places: Mapping[str, tuple[int, int]]) -> list[str]:
    """A curve per input, with a dot where a Cast stands."""
    lines, producer = [], {item.name: item.name for item in graph.input}
    for node in graph.node:
        for source in dict.fromkeys(producer[value] for value in node.input if value in producer):
            (x, y), (to_x, to_y) = places[source], places[node.name]
            passed = [places[f"{source}@{index}"] for index in range(x // COLUMN + 1, to_x // COLUMN)]
            path, x, y = f"M{x + WIDTH} {y + HEIGHT // 2}", x + WIDTH, y + HEIGHT // 2
            for place in (*passed, (to_x, to_y)):
                half, (left, middle) = (x + place[0]) // 2, (place[0], place[1] + HEIGHT // 2)
                path += f"C{half} {y} {half} {middle} {left} {middle}" + f"h{WIDTH}" * (place in passed)
                cast, x, y = (half, (y + middle) // 2), left + WIDTH, middle
            lines.append(f'<path class="edge" d="{path}"/>')
            ends = {kinds[source], kinds[node.name]}
            if "low" in ends and ends & {"high", "hazard"}:
                lines.append(f'<circle class="cast" cx="{cast[0]}" cy="{cast[1]}" r="5"/>')
        producer |= dict.fromkeys(node.output, node.name)
    return lines


def boxes(graph: GraphProto, kinds: Mapping[str, str], places: Mapping[str, tuple[int, int]]) -> list[str]:
    """A box per input and node."""
    labels = {item.name: (item.name, "input") for item in graph.input}
    labels |= {node.name: (node.op_type, node.name) for node in graph.node}
    lines = []
    for name, (label, note) in labels.items():
        x, y = places[name]
        middle = x + WIDTH // 2
        lines += [
            f'<rect class="{kinds[name]}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            f'<text x="{middle}" y="{y + 18}" text-anchor="middle">{escape(label.removesuffix("Linear"))}</text>',
            f'<text class="note" x="{middle}" y="{y + 33}" text-anchor="middle">{escape(note)}</text>',
        ]
    return lines


def legend(top: int) -> list[str]:
    """What colors and dots mean."""
    lines, x = [], MARGIN
    for kind, text in LEGEND:
        lines.append(f'<rect class="{kind}" x="{x}" y="{top - 14}" width="16" height="12" rx="3"/>')
        lines.append(f'<text class="note" x="{x + 22}" y="{top - 4}">{text}</text>')
        x += 36 + 7 * len(text)
    lines.append(f'<circle class="cast" cx="{x + 6}" cy="{top - 8}" r="5"/>')
    lines.append(f'<text class="note" x="{x + 16}" y="{top - 4}">Cast</text>')
    return lines


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=GRAPHS, help="folder of the pictures")
    folder = arguments.parse_args().out
    for source in sorted(GRAPHS.glob("*.onnxtxt")):
        (folder / f"{source.stem}.svg").write_text(draw(source), encoding="utf-8")
