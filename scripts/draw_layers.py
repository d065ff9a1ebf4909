"""Draw docs/layers.svg: the rooms of the package, what each imports, and how long it is, read from the source.

python3 scripts/draw_layers.py [--out FILE]

Uses nothing but the standard library. The same source gives the same bytes.
"""

import argparse
import ast
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "onnxamp"
PICTURE = ROOT / "docs" / "layers.svg"

LEFT, TOP, ROW, CELL = 16, 88, 30, 22
GAP = 26
"""Height of the heading of a group."""
NAME, PURPOSE, LINES = LEFT + 8, LEFT + 112, LEFT + 474
BAR = 62
"""Width of the longest bar."""
MATRIX = LINES + BAR + 46
PURPOSE_CHARACTERS = 54
CAPTION_CHARACTERS = 170
CAPTION = (
    "Public rooms are violet. A dot means that the room of its row imports the room of its column; the more modules do,"
    " the larger it is. Dots lie right of the diagonal: imports point down. A red dot breaks that rule."
)
STYLE = """
    text { fill: #0f172a } .name { font-weight: 600; font-size: 13px } .public { fill: #6d28d9 }
    .note { fill: #475569; font-size: 11.5px } .head { fill: #475569; font-size: 12px; font-weight: 600 }
    .even { fill: #ffffff } .odd { fill: #f1f5f9 } .bar { fill: #94a3b8 } .own { fill: #cbd5e1 }
    .import { fill: #2563eb } .back { fill: #dc2626 } .grid { stroke: #e2e8f0; fill: none }
    .group { fill: #0f172a; font-size: 12.5px; font-weight: 600 }
    .label { font-size: 11px; fill: #475569 }
"""


@dataclass(frozen=True)
class Room:
    """A folder or a module directly below the package; the package itself is the room "onnxamp"."""

    name: str
    purpose: str
    lines: int
    imports: Mapping[str, int]
    """Room -> number of modules here that import from it."""
    level: int = 0
    """One more than that of any room it imports."""
    is_core: bool = False
    """Whether it is the command line, or a room that the command line imports, directly or through others."""


TOP_OF_CORE = "_cli"
"""The core is this room and all that it imports; the package itself imports rooms of both groups."""
GROUPS = {False: "Apart: the core names none of these, and asks for what they offer", True: "Core"}
HEADS = ((NAME, "room"), (PURPOSE, "purpose"), (LINES, "lines, about"))


def read_rooms() -> dict[str, Room]:
    """All rooms by name, without levels."""
    files = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in sorted(PACKAGE.rglob("*.py"))}
    del files["__main__",]  # starts the command line, and nothing else
    modules = {".".join(("onnxamp", *parts)).removesuffix(".__init__"): path for parts, path in files.items()}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    lines, imports = Counter[str](), {room_of(name): Counter[str]() for name in modules}
    for name, tree in trees.items():
        room = room_of(name)
        lines[room] += len(modules[name].read_text(encoding="utf-8").splitlines())
        package = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
        imports[room].update({room_of(item) for item in imported(tree, package, modules.keys())} - {room})
    purposes = {room_of(name): ast.get_docstring(tree) or "" for name, tree in trees.items() if name.count(".") < 2}
    # In hundreds, so that the picture changes with the structure and not with every line.
    about = {room: max(100, round(count, -2)) for room, count in lines.items()}
    return {room: Room(room, first_sentence(purposes[room]), about[room], imports[room]) for room in imports}


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, without markup."""
    return docstring.partition("\n")[0].partition(". ")[0].rstrip(".").replace("`", "")


def room_of(module: str) -> str:
    """The room that a module belongs to: "_cli" for ``onnxamp._cli.convert``."""
    return [*module.split("."), "onnxamp"][1]


def imported(tree: ast.Module, package: str, modules: Collection[str]) -> Iterator[str]:
    """Modules of onnxamp that a module imports, inside functions, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield from (name for name in (full if full in modules else module,) if name in modules)


def in_levels(rooms: Mapping[str, Room]) -> list[Room]:
    """Rooms apart and then those of the core, each from those that import most to those that import nothing.

    Rooms that import each other in a circle are cut where that leaves the fewest imports against the order.
    """
    placed: dict[str, Room] = {}
    reached = {name: reached_from(name, rooms) for name in rooms}
    while waiting := sorted(rooms.keys() - placed.keys()):
        missing = {name: rooms[name].imports.keys() - placed.keys() for name in waiting}
        ready = [name for name in waiting if not missing[name]]
        if not ready:
            circle = [
                name for name in waiting if all(name in reached[other] for other in reached[name] - placed.keys())
            ]
            ready = [min(circle, key=lambda name: sum(rooms[name].imports[other] for other in missing[name]))]
        for name in ready:
            below = [placed[other].level for other in rooms[name].imports if other in placed and other not in ready]
            is_core = name == TOP_OF_CORE or name in reached[TOP_OF_CORE]
            placed[name] = replace(rooms[name], level=1 + max(below, default=-1), is_core=is_core)
    return sorted(placed.values(), key=lambda room: (room.is_core, -room.level, room.name.lstrip("_")))


def reached_from(name: str, rooms: Mapping[str, Room]) -> set[str]:
    """Rooms that a room imports from, directly or through others."""
    reached, waiting = set[str](), [name]
    while waiting:
        further = rooms[waiting.pop()].imports.keys() - reached
        reached |= further
        waiting += further
    return reached


def draw(rooms: list[Room]) -> str:
    """The picture: a row per room, with its purpose, its length, and a dot below each room that it imports."""
    places = places_of(rooms)
    right, bottom = MATRIX + CELL * len(rooms), places[-1] + ROW
    caption = textwrap.wrap(CAPTION, CAPTION_CHARACTERS)
    width, height = right + 48, bottom + 19 + 15 * len(caption)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
        f"  <style>{STYLE}  </style>",
        f'  <rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        *(text(x, TOP - 12, "head", word) for x, word in HEADS),
        *(text(NAME, bottom + 22 + 15 * number, "note", line) for number, line in enumerate(caption)),
    ]
    longest = max(room.lines for room in rooms)
    for row, room in enumerate(rooms):
        is_first = row == 0 or room.is_core != rooms[row - 1].is_core
        if is_first:
            parts.append(text(NAME, places[row] - 8, "group", GROUPS[room.is_core]))
        parts += draw_row(places[row], room, "odd" if room.level % 2 else "even", right, longest)
    for row, room in enumerate(rooms):
        x, y = MATRIX + CELL * row, places[row]
        parts.append(f'  <path class="grid" d="M{x} {TOP}V{y}H{right}"/>')
        turned = f'transform="rotate(-55 {x + CELL / 2:g} {TOP - 8})"'
        parts.append(text(x + CELL / 2, TOP - 8, "label", room.name, turned))
    for row, y in enumerate(places):
        parts += draw_imports(row, y, rooms)
    return "\n".join([*parts, "</svg>\n"])


def places_of(rooms: list[Room]) -> list[int]:
    """The upper end of each row, below the headings of the groups."""
    groups = [sorted({room.is_core for room in rooms[: row + 1]}) for row in range(len(rooms))]
    return [TOP + ROW * row + GAP * len(groups[row]) for row in range(len(rooms))]


def draw_row(y: int, room: Room, band: str, right: int, longest: int) -> list[str]:
    """The band of a row, its texts, and the bar of its length."""
    purpose = textwrap.wrap(room.purpose, PURPOSE_CHARACTERS, max_lines=2, placeholder=" ...")
    first = y + 19 - 6.5 * (len(purpose) - 1)
    bar = BAR * room.lines / longest
    public = "" if room.name.startswith("_") else " public"
    return [
        f'  <rect class="{band}" x="{LEFT}" y="{y}" width="{right - LEFT}" height="{ROW}"/>',
        text(NAME, y + 19, f"name{public}", room.name),
        *(text(PURPOSE, first + 13 * number, "note", line) for number, line in enumerate(purpose)),
        f'  <rect class="bar" x="{LINES}" y="{y + 10}" width="{bar:.1f}" height="10" rx="2"/>',
        text(LINES + bar + 5, y + 19, "note", f"{room.lines:,}"),
    ]


def draw_imports(row: int, y: int, rooms: list[Room]) -> list[str]:
    """The dots of a row; on the diagonal stands the room itself."""
    room, middle = rooms[row], y + ROW / 2
    own = MATRIX + CELL * row
    parts = [f'  <rect class="own" x="{own + 4}" y="{y + 8}" width="{CELL - 8}" height="{ROW - 16}" rx="3"/>']
    for column, other in enumerate(rooms):
        if count := room.imports.get(other.name):
            kind, radius = "import" if column > row else "back", min(2.5 + 0.9 * (count - 1) ** 0.5, 7.5)
            title = f"<title>{escape(room.name)} imports {escape(other.name)}: {count} module(s)</title>"
            x = MATRIX + CELL * column + CELL / 2
            parts.append(f'  <circle class="{kind}" cx="{x}" cy="{middle}" r="{radius:.1f}">{title}</circle>')
    return parts


def text(x: float, y: float, kind: str, words: str, more: str = "") -> str:
    """One line of text."""
    return f'  <text class="{kind}" x="{x:g}" y="{y:g}"{" " * bool(more)}{more}>{escape(words)}</text>'


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, help="where it goes [docs/layers.svg]")
    out = parser.parse_args().out
    out.write_text(draw(in_levels(read_rooms())), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
