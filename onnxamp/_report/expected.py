"""The error to expect of a result, before it runs, beside what was measured."""

from collections.abc import Iterator

from onnxamp._convert.plan import ExpectedError
from onnxamp._numerics.results import DiffReport
from onnxamp._report.parts import Figure, Item, Level, Part, table
from onnxamp._report.text import count, number, percent


def expected_figures(expected: ExpectedError | None) -> Iterator[Figure]:
    """The error to expect in one number."""
    if expected is None or expected.error is None or not expected.samples:
        return
    error, bound = number(expected.error), number(expected.bound or 0.0)
    remark = f"relative L2, below {bound} on 99.99 % of inputs like the samples"
    yield Figure("expected error", error, remark, f"expected error {error}")


def expected_parts(
    expected: ExpectedError | None, measured: DiffReport | None = None
) -> Iterator[Part]:
    """What is expected, beside what was measured, and the nodes that contribute most."""
    if expected is None:
        return
    if expected.error is None:
        yield Item(f"Unknown: {expected.why}", Level.WARNING)
        return
    if not expected.samples:
        yield Item("None: all floats stay float32.")
        return
    columns = ["expected", "99.99 % bound"]
    cells = [number(expected.error), number(expected.bound or 0.0)]
    errors = [
        output.rel_l2
        for output in (measured.outputs if measured is not None else ())
        if output.is_float
    ]
    if errors:
        columns.append("measured")
        cells.append(number(max(errors)))
    yield table(columns, [cells], right=range(len(columns)), drop=())
    told = f"Relative L2 errors of the worst output, from one backward pass through {count(expected.samples, 'sample')}."
    if expected.samples > 1 and expected.least is not None:
        told = f"{told[:-1]}; on the best one {number(expected.least)} is expected."
    yield Item(told)
    if expected.jumps:
        yield Item(
            f"{count(len(expected.jumps), 'node')} select by value, and may select something else: the effect of that is"
            " not predicted.",
            Level.WARNING,
            members=expected.jumps,
        )
    if expected.spread:
        yield Item(
            f"Errors upstream of {count(len(expected.spread), 'node')} without a gradient are known less exactly.",
            members=expected.spread,
        )
    rows = ((row.node, row.op, percent(row.share, 1.0)) for row in expected.nodes)
    columns = ["node", "op", "share of the squared error"]
    yield table(columns, rows, right=(2,), drop=())
