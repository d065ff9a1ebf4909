"""What is in a model: its nodes by precision, its weights by type, and its Casts."""

from collections.abc import Mapping
from typing import Final

from onnxamp._audit.findings import Audit
from onnxamp._dtypes import FORMATS
from onnxamp._report import parts
from onnxamp._report.text import count, percent, size
from onnxamp._runtime.sizes import listed

PRECISIONS: Final = (*FORMATS, "mixed", "float32", "float64", "no floats")
"""Precisions of nodes, in the order in which they are shown."""


def node_figure(dtype: str, counts: Mapping[str, int]) -> tuple[parts.Figure, ...]:
    """How many of the nodes that compute with floats are in low precision; nothing where none does."""
    low = counts.get(dtype, 0) + counts.get("mixed", 0)
    floats = sum(counts.get(kind, 0) for kind in PRECISIONS if kind != "no floats")
    kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in PRECISIONS if counts.get(kind))
    share = percent(low, floats)
    return (
        (parts.Figure(f"nodes in {dtype}", share, kinds, f"{share} of nodes in {dtype}"),)
        if floats
        else ()
    )


def node_bar(label: str, counts: Mapping[str, int]) -> parts.Bar:
    """Nodes by precision."""
    shares = (
        parts.Share(kind, counts[kind], f"{counts[kind]:,}")
        for kind in PRECISIONS
        if counts.get(kind)
    )
    return parts.Bar(label, f"{sum(counts.values()):,}", tuple(shares))


def weight_bar(label: str, sizes: Mapping[str, int]) -> parts.Bar:
    """Bytes of weights by type."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shares = (parts.Share(kind, bytes_, size(bytes_)) for kind, bytes_ in ordered if bytes_)
    return parts.Bar(label, size(sum(sizes.values())), tuple(shares))


def traffic_figures(audit: Audit | None) -> tuple[parts.Figure, ...]:
    """Casts between floats, and what they move."""
    if audit is None:
        return ()
    casts = audit.casts
    redundant = f"{casts.redundant:,} redundant; " if casts.redundant else ""
    at = f" at {listed(casts.assumed)} (assumed)" if casts.assumed and casts.count else ""
    left = f"; {casts.unsized:,} of unknown size" if casts.unsized else ""
    return (
        parts.Figure(
            "Casts between floats",
            f"{casts.count:,}",
            f"{redundant}about {size(casts.bytes)} moved per run{at}{left}",
            count(casts.count, "Cast"),
        ),
    )
