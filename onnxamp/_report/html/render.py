"""The page as HTML: one file that loads nothing, and in which no name from a model is more than text.

Everything that the templates insert is made printable and escaped. Names also lie in a JSON block whose ``<``, ``>``
and ``&`` are escaped, and which the script only ever sets as text. A content security policy allows this one script and
this one style sheet, by hash.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import isfinite, isnan
from operator import attrgetter
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup, escape

from onnxamp._base.errors import printable
from onnxamp._base.paths import as_path
from onnxamp._model.staging import write_file
from onnxamp._report import glued, named, said
from onnxamp._report.html import Page
from onnxamp._report.html.nodes import NodeRow, ValueRow
from onnxamp._report.html.plot import plot_of
from onnxamp._report.layout import middle_cut
from onnxamp._report.parts import MARKS, Part, Report, listed_parts
from onnxamp._tuning.results import Tuned

if TYPE_CHECKING:
    from jinja2 import Environment

_SCRIPTS: Final = (
    "data.js",
    "along.js",
    "tracks.js",
    "nodes.js",
    "candidates.js",
    "main.js",
)
_LONGEST_WORD: Final = 40
"""Characters of a name in a remark below a figure: more would make a third line."""
_LONGEST_CELL: Final = 72
"""Characters of a name in a table: two lines on a phone."""
_ESCAPES: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def render(page: Page) -> str:
    """Return the page as one HTML document. Equal pages give equal text. Complexity: linear in nodes and values."""
    data = _embedded(_data(page))
    return _document("page.html.jinja", _script(), page=page, data=data)


def _document(template: str, script: str, **facts: Any) -> str:
    """Return a whole page with a script and the styles, which the policy allows by their hashes."""
    style = _static("page.css")
    page = _environment().get_template(template)
    return page.render(
        prefix="",
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        **facts,
    )


def render_part(report: Report, tuned: Tuned | None = None) -> str:
    """Return a report as HTML for use inside another document, without a script and with scoped styles.

    With ``tuned``, its candidates are also plotted. Ids have a prefix, so that a document may contain several reports.
    """
    part = _environment().get_template("part.html.jinja")
    prefix = f"onnxamp-{sha256(repr(report).encode()).hexdigest()[:8]}-"
    return part.render(
        report=report,
        plot=plot_of(tuned) if tuned else None,
        style=_scoped_style(),
        prefix=prefix,
    )


def render_index(report: Report, lines: Iterable[Any]) -> str:
    """Return the index of a folder's pages; ``lines`` are those of :mod:`onnxamp._fleet.index`."""
    return _document(
        "index.html.jinja", _static("index.js"), report=report, lines=lines
    )


@cache
def _scoped_style() -> str:
    """Return the styles of the parts, nested in the class of the part."""
    # A notebook has no figure of nodes, is not printed as a page, and chooses light or dark by itself.
    unused = r"/\* Figure \*/.*?(?=/\* Candidates)|@media print.*"
    sheet = re.sub(unused, "", _static("page.css"), flags=re.DOTALL)
    sheet = re.sub(r"^:root\[.*\n|^html .*\n", "", sheet, flags=re.MULTILINE)
    nested = re.sub(r"^(?::root|body) \{", "& {", sheet, flags=re.MULTILINE)
    return f".onnxamp-report {{\n{nested}}}\n"


def write_page(page: Page, path: str | PathLike[str]) -> None:
    """Write the page to a file, whole or not at all.

    Raises:
        OutputError: the file cannot be written; the previous file is untouched.
    """
    write_file(as_path(path), render(page).encode("utf-8", errors="backslashreplace"))


_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]{0,28}(?![\w-])")
"""An option in a sentence; nothing longer, because it would exceed narrow pages."""


@cache
def _environment() -> "Environment":
    # Commands that may write a page import this module, and few do.
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        loader=PackageLoader("onnxamp._report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_bounded,
    )
    environment.filters |= {
        "whole": _whole,
        "glued": _prose,
        "short": _short,
        "cut": _cut,
        "at": "{:.2f}".format,
        "listed": listed_parts,
    }
    environment.tests["kind"] = _is_kind
    environment.globals["marks"] = MARKS
    return environment


def _bounded(item: Any) -> Any:
    """Return text as it can be shown, printable and of bounded length; markup and other items stay as they are."""
    is_text = isinstance(item, str) and not isinstance(item, Markup)
    return said(item) if is_text else item


def _whole(command: str) -> Markup:
    """Return a command, which is never shortened: it would be another one."""
    return escape(printable(command))


def _glued(text: str) -> Markup:
    """Return text as it can be shown, in which numbers keep their units."""
    safe = str(escape(said(text)))
    return Markup(glued(safe).replace("\xa0", "&nbsp;"))  # noqa: S704 - it is escaped


def _prose(text: str) -> Markup:
    """Return a sentence as it can be shown, in which options are not broken at their hyphens."""
    whole = _OPTION.sub(r'<span class="option">\g<0></span>', str(_glued(text)))
    return Markup(whole)  # noqa: S704 - it is escaped


def _short(text: str) -> Markup:
    """Return a remark whose long names lose their middle, and may be broken between their parts."""
    words = (middle_cut(word, _LONGEST_WORD) for word in printable(text).split(" "))
    # No entity of escaped text contains a slash.
    return _glued(" ".join(words)).replace("/", Markup("/<wbr>"))


def _cut(name: str) -> str:
    """Return a name in a table, without its middle if it is long."""
    return middle_cut(named(name), _LONGEST_CELL)


def _is_kind(part: Part, kind: str) -> bool:
    """Return whether a part is of a kind: ``part is kind("table")`` in a template."""
    return type(part).__name__.lower() == kind


@cache
def _static(name: str) -> str:
    """Return a static file with the line ends that its hash is for, even if a checkout changed them."""
    file = files("onnxamp._report.html") / "static" / name
    return file.read_text(encoding="utf-8").replace("\r\n", "\n")


@cache
def _script() -> str:
    """Return all scripts as one, in a scope of their own."""
    return "\n".join(
        ['"use strict";', "(() => {", *map(_static, _SCRIPTS), "})();", ""]
    )


def _hash(text: str) -> str:
    digest = sha256(text.encode("utf-8")).digest()
    return f"sha256-{b64encode(digest).decode('ascii')}"


def _embedded(data: Any) -> str:
    """Return JSON that can stand inside a script element."""
    compact = (",", ":")
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=compact)
    return text.translate(_ESCAPES)


def _data(page: Page) -> dict[str, Any]:
    """Return the data of the script as columns, which are several times smaller than records."""
    low = page.low
    window = None
    if low is not None:
        least = (low.smallest_normal, low.smallest_subnormal, low.epsilon / 2)
        window = {"name": low.name, "limits": (low.max_finite, *least)}
    return {
        "nodes": _nodes(page.nodes),
        "values": _values(page.values),
        "window": window,
        "limit": _number(page.limit),
        "firstBad": page.first_bad,
        "firstBadText": said(page.first_bad_text),
    }


def _nodes(nodes: tuple[NodeRow, ...]) -> dict[str, Any]:
    texts = ("op", "scope", "precision", "provider", "quantized", "why", "reason")
    data: dict[str, Any] = {"name": [named(node.name) for node in nodes]}
    for text in texts:
        data[text] = _table(map(attrgetter(text), nodes))
    data["casts"] = [number for number, node in enumerate(nodes) if node.is_cast]
    messages = data["messages"] = {}
    for number, node in enumerate(nodes):
        unique = dict.fromkeys(node.messages)
        if unique:
            messages[number] = [[int(one.level), said(one.text)] for one in unique]
    return data


def _values(values: tuple[ValueRow, ...]) -> dict[str, Any]:
    numbers = ("local", "accumulated", "least", "largest")
    data: dict[str, Any] = {
        "node": [value.node for value in values],
        "name": [named(value.name) for value in values],
        "dtype": _table(value.dtype for value in values),
    }
    for name in numbers:
        data[name] = list(map(_number, map(attrgetter(name), values)))
    data["exponents"] = {
        number: value.exponent for number, value in enumerate(values) if value.exponent
    }
    return data


def _table(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Return each text once, and for each row its number."""
    seen: dict[str, int] = {}
    rows = [seen.setdefault(text, len(seen)) for text in texts]
    return {"texts": [said(text) for text in seen], "rows": rows}


def _number(x: float | None) -> float | str | None:
    """Return a number with four digits, which are more than a figure shows; numbers that JSON lacks become words."""
    if x is None:
        return None
    if isnan(x):
        return "nan"
    if not isfinite(x):
        return "inf" if x > 0 else "-inf"
    return float(f"{x:.4g}")
