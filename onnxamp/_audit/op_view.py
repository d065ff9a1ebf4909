"""All that is known of an op, gathered from every table: the answer to "why is this op treated like that?".

Each table has a function here that turns the rows of one op into facts. :data:`_TOPICS` orders them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from itertools import chain, groupby
from types import ModuleType
from typing import Any, Final, TypeAlias

from onnx.defs import get_all_schemas_with_history, onnx_opset_version

from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.public import Shown
from onnxamp._base.records import record
from onnxamp._decide.kinds import kinds
from onnxamp._facts.dimensions import dimension_rules
from onnxamp._facts.dtypes import FORMATS, LOW_TENSORS
from onnxamp._facts.exponents import ALL, Term, exponent_rules
from onnxamp._facts.kernels import float32_accumulators, kernel_table
from onnxamp._facts.ops import DERIVED, op_facts
from onnxamp._facts.providers import placement_rules
from onnxamp._facts.signature import lookup
from onnxamp._facts.tables import read_table, target_json, target_table
from onnxamp._facts.targets import known_versions, targets
from onnxamp._gradients.pointwise import FORMULAS
from onnxamp._gradients.recurrent import UNROLLED
from onnxamp._gradients.walk import FLAT
from onnxamp._gradients.walk import RULE_MODULES as GRADIENTS
from onnxamp._graph.bounds.walk import RULE_MODULES as BOUNDS
from onnxamp._graph.match import form_table
from onnxamp._graph.quantized import OPERATORS
from onnxamp._options.lists import (
    PRESETS,
    is_known_op,
    nearest_name,
    ops_named,
    preset,
    stated_in,
)
from onnxamp._rewrite.passes.upgrade_rules import upgrade_rows


@record
class OpFact:
    """A fact about an op.

    Attributes:
        topic: what it is about: "list", "kernel", "accumulator", "placement", "hazard", "gradient", ...
        text: the fact in words.
        file: where it is stated: a file of ``onnxamp/_data``, or else the module.
        source: the source that the row states; "" if the head of the file states one for all rows.
        target: the target that it is true of; "" if of all.
    """

    topic: str
    text: str
    file: str
    source: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class OpView(Shown):
    """All that is known of an op.

    Attributes:
        op: its type, with the domain outside ai.onnx ("com.microsoft::Gelu").
        facts: the facts, by topic.

    Example:
        >>> import onnxamp
        >>> view = onnxamp.describe_op("LayerNormalization")
        >>> {fact.file for fact in view.facts if fact.topic == "fold"}
        {'folds.toml'}
    """

    op: str
    facts: tuple[OpFact, ...]


def describe_op(op: str) -> OpView:
    """Return all that is known of an op: lists, kernels, hazards, gradients, bounds, folds, upgrades, and what it
    computes.

    Args:
        op: the op type, with the domain outside ai.onnx ("com.microsoft::Gelu").

    Raises:
        ArgumentError: no op has that name.
        ArgumentTypeError: ``op`` is not a string.

    Example:
        >>> import onnxamp
        >>> view = onnxamp.describe_op("Softmax")
        >>> [fact.text for fact in view.facts if fact.topic == "gradient"]
        ['y * (dy - (dy * y).sum([axis]))']
    """
    if not isinstance(op, str):
        raise ArgumentTypeError(
            f"op must be a string such as 'Softmax', not {type(op).__name__}."
        )
    meant = ops_named(op)
    if not is_known_op(op) or meant != (op,):
        name = nearest_name(op)
        near = meant if is_known_op(op) else ops_named(name) if name else ()
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ArgumentError(f"There is no op type {op!r}.{hint}")
    return OpView(op, tuple(chain.from_iterable(topic(op) for topic in _TOPICS)))


def _lists(op: str) -> Iterator[OpFact]:
    """Yield the entries of the presets, and the names of frameworks that mean the op."""
    for name in PRESETS:
        known = preset(name)
        for color, entries in (("white", known.white), ("black", known.black)):
            if op not in entries:
                continue
            file = f"oplists/{stated_in(name, color)}.toml"
            text = f"on the {color} list of {name}"
            if color == "black" and known.trusts_kernels:
                text += _exceptions(op)
            yield OpFact("list", text, file, entries[op])
        for level, entries in known.black_at.items():
            if op in entries:
                file = f"oplists/{stated_in(name, 'black_at')}.toml"
                text = f"on the black list of {name} at {level}"
                yield OpFact("list", text, file, entries[op])
        names = [own for own, ops in known.names.items() if op in ops]
        if names:
            text = f"{name} calls it {', '.join(names)}"
            yield OpFact("list", text, f"oplists/{stated_in(name, 'names')}.toml")


def _exceptions(op: str) -> str:
    """Return where a preset that trusts kernels does not keep a black-listed op in float32, in a clause."""
    lows = list[str]()
    for name in targets():
        low = [low for low in FORMATS if op in float32_accumulators(name, low)]
        if low:
            lows.append(f"{name} ({' and '.join(low)})")
    if not lows:
        return ""
    return f", except where kernels accumulate in float32: {', '.join(lows)}"


def _exactness(op: str) -> Iterator[OpFact]:
    """Yield the flags and columns of the op, and whether it is exact."""
    facts = op_facts()
    file = "ops.toml"
    if op in facts.exact:
        text = "exact: rounding before or after it gives the same result"
        when = facts.exact_when.get(op)
        condition = f" if {_words(when)}" if when else ""
        yield OpFact("exactness", text + condition, file)
    else:
        yield OpFact("exactness", "not exact: low precision rounds its results", file)
    flags = list[str]()
    derived = list[str]()
    for column in fields(facts):
        entries = getattr(facts, column.name)
        if op not in entries:
            continue
        if column.name in DERIVED:
            derived.append(column.name)
        elif isinstance(entries, AbstractSet):
            flags.append(column.name)
        else:
            yield OpFact("column", f"{column.name} = {_words(entries[op])}", file)
    if flags:
        yield OpFact("flags", ", ".join(flags), file)
    if derived:
        yield OpFact("flags", ", ".join(derived), "onnxamp/_facts/ops.py")


def _kernels(op: str) -> Iterator[OpFact]:
    """Yield the low-precision types of kernels, by target and by version of ONNX Runtime."""
    for name, target in targets().items():
        if not target.has_kernels and not target.builds:
            continue
        versions = known_versions(name) if target.versioned else ("",)
        low = [(version, _low_kernels(name, version, op)) for version in versions]
        table = target_json(name, "kernels")
        asked = ", ".join(f"{key} {table[key]}" for key in _MAKERS if table.get(key))
        # Versions with the same kernels in a row are one fact.
        for text, group in groupby(low, key=lambda pair: pair[1]):
            same = [version for version, _ in group]
            span = f"{same[0]} to {same[-1]}: " if same[0] else ""
            span = f"{same[0]}: " if same[0] and len(same) == 1 else span
            is_newest = versions[-1] in same
            file = "kernels.json" if is_newest else "history.json"
            source = asked if is_newest else f"onnxruntime {same[-1]}"
            yield OpFact("kernel", span + text, f"targets/{name}/{file}", source, name)


_MAKERS: Final = ("onnxruntime", "tensorrt_rtx", "package")
"""Fields of kernel tables that say what was asked."""


def _low_kernels(name: str, version: str, op: str) -> str:
    """Return the low-precision types that kernels take, with the versions of the op."""
    provider = f"{name}@{version}" if version else name
    table = kernel_table(provider).get(op, ())
    spans = defaultdict[str, list[_Span]](list)
    for row in sorted(table, key=lambda row: row.since):
        accepted = set[str]().union(*row.types.values())
        last = row.since if row.until is None else row.until
        for kind, low in LOW_TENSORS.items():
            if kind in accepted:
                _extend(spans[low.name], row.since, last)
    alike = defaultdict[tuple[_Span, ...], list[str]](list)
    for low in LOW_TENSORS.values():
        if low.name in spans:
            alike[tuple(spans[low.name])].append(low.name)
    if alike:
        return "; ".join(
            f"{' and '.join(lows)} for op {_versions(own)}"
            for own, lows in alike.items()
        )
    return "float32 only" if table else "no kernel"


_Span: TypeAlias = tuple[int, int]
"""The first and the last version of an op."""


def _extend(spans: list[_Span], first: int, last: int) -> None:
    """Add versions to spans in order; adjacent ones become one."""
    if spans and first <= spans[-1][1] + 1:
        earlier, before = spans.pop()
        first = earlier
        last = max(last, before)
    spans.append((first, last))


def _versions(spans: Sequence[_Span]) -> str:
    """Return versions of an op in words."""
    words = [
        str(first) if first == last else f"{first} to {last}" for first, last in spans
    ]
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"{'version' if is_one else 'versions'} {', '.join(words)}"


def _of_targets(op: str) -> Iterator[OpFact]:
    """Yield what targets say of the op besides its kernels."""
    for name in targets():
        folder = f"targets/{name}"
        for row in target_table(name, "accumulate").get("rows", ()):
            if row["op"] == op:
                text = f"{_types(row)} accumulated in {row['accumulator']}{_releases(row)}"
                file = f"{folder}/accumulate.toml"
                source = row.get("source", "")
                yield OpFact("accumulator", text, file, source, name)
        yield from _arithmetic(op, name)
        # "any" has no rows of its own: those in its name are failures on all other targets.
        if target_table(name, "placement"):
            for row in placement_rules(name, op):
                source = row.get("source", "")
                file = f"{folder}/placement.toml"
                yield OpFact("placement", row["because"], file, source, name)
        for table, topic in (("wrong", "wrong kernel"), ("optimizers", "optimizer")):
            for row in target_table(name, table).get("rows", ()):
                if op in row["ops"]:
                    source = row.get("source", "")
                    file = f"{folder}/{table}.toml"
                    kinds = _types(row) if "types" in row else ""
                    when = f"{kinds}{_releases(row)}".strip()
                    text = ": ".join(filter(None, (when, row["because"])))
                    yield OpFact(topic, text, file, source, name)


def _types(row: Mapping[str, Any]) -> str:
    """Return the types that a row is about."""
    return " and ".join(row["types"])


def _releases(row: Mapping[str, Any]) -> str:
    """Return the releases of the runtime of which a row is true, in a clause; "" if of all."""
    limits = (f" {key} {row[key]}" for key in ("since", "before") if key in row)
    return "".join(limits)


def _arithmetic(op: str, target: str) -> Iterator[OpFact]:
    """Yield how a target computes the op in float16."""
    data = target_table(target, "arithmetic")
    for part in ("products", "sums", "normalizations", "steps", "elementwise"):
        for name, row in data.get(part, {}).items():
            if name.partition(" ")[0] == op:
                form = name.removeprefix(op).strip()
                terms = 4096 if part in ("products", "sums") else 1
                text = "; ".join(_phrases(row, terms))
                text = f"{form}: {text}" if form else text
                file = f"targets/{target}/arithmetic.toml"
                yield OpFact("arithmetic", text, file, data.get("source", ""), target)


def _phrases(row: Mapping[str, Any], terms: int) -> Iterator[str]:
    """Yield what a row says of the arithmetic of an op; errors are those of sums of so many terms."""
    if "accumulator" in row:
        yield f"accumulates in {row['accumulator']}{_ORDERS[row.get('order')]}"
    if "growth" in row:
        errors = f"errors of sums of {terms:,} terms" if terms > 1 else "errors"
        times = "" if row["growth"] == 1 else f"{row['growth']:g} times "
        yield f"{errors} are {times}those of one rounding"
    if "largest" in row:
        yield f"the largest error is {row['largest']:g} units in the last place"
    if row.get("overflows"):
        yield "a sum may overflow on the way to a result that fits"
    if row.get("cancels"):
        yield "subtracts the mean in float16, which loses digits if the mean is large"
    if "split" in row:
        few, many = row["split"], row["results"]
        yield f"one accumulator for fewer than {few:,} terms, or for {many:,} results and more"
    if "computed" in row:
        yield f"computed as {row['computed']}"


_ORDERS: Final = {
    "sequential": ", with one accumulator",
    "parallel": ", with several accumulators",
    "float32": "",
    None: "",
}
"""What the order of a sum adds to its accumulator."""


def _hazards(op: str) -> Iterator[OpFact]:
    """Yield the hazards that begin at nodes of the op."""
    for kind in kinds():
        if op in kind.ops():
            module = type(kind).__module__.replace(".", "/")
            yield OpFact("hazard", f"{kind.value}: {kind.title}", f"{module}.py")


def _gradients(op: str) -> Iterator[OpFact]:
    """Yield the formula of the gradient, or the module with its rule."""
    if op in FORMULAS:
        formula = FORMULAS[op]
        text = formula if isinstance(formula, str) else "; ".join(formula)
        yield OpFact("gradient", text, "gradients.toml")
        return
    file = _file_with(op, GRADIENTS)
    if file:
        text = "a rule in code"
    elif op in FLAT:
        text, file = "zero: it is constant almost everywhere, or random", _WALK
    elif op in UNROLLED:
        text, file = "that of its steps, into which it is unrolled", _EXPANSION
    elif _has_function(op):
        text, file = "that of the nodes of its function", _EXPANSION
    else:
        text, file = "no rule, so no gradient passes it", "onnxamp/_gradients"
    yield OpFact("gradient", text, file)


def _has_function(op: str) -> bool:
    """Return whether a function defines the newest version of the op."""
    domain, _, name = op.rpartition("::")
    newest = lookup(domain, name, onnx_opset_version())
    return newest is not None and newest.has_function


_WALK: Final = "onnxamp/_gradients/walk.py"
_EXPANSION: Final = "onnxamp/_gradients/expansion.py"


def _bounds(op: str) -> Iterator[OpFact]:
    """Yield the formula of the bound of its first output, or the module with its rule."""
    formulas = read_table("bounds")
    if op in formulas:
        yield OpFact("bound", formulas[op], "bounds.toml")
        return
    file = _file_with(op, BOUNDS)
    text = "a rule in code" if file else "no rule, so nothing is proven of its results"
    yield OpFact("bound", text, file or "onnxamp/_graph/bounds")


def _file_with(op: str, modules: tuple[ModuleType, ...]) -> str:
    """Return the file of the module that has a rule for the op; "" if there is none."""
    # Of several rules, the last one applies.
    for module in reversed(modules):
        if op in module.RULES:
            return f"{module.__name__.replace('.', '/')}.py"
    return ""


def _folds(op: str) -> Iterator[OpFact]:
    """Yield the decomposed forms that become the op."""
    table = form_table()
    for name, kind in table.kinds.items():
        own = [target for target, result in kind.own.items() if result == op]
        if op != kind.op and not own:
            continue
        count = sum(form.kind == name for form in table.forms)
        where = f"on {', '.join(own)}" if own else f"from opset {kind.opset} on"
        text = f"{count} decomposed forms of {kind.called} become it {where}"
        yield OpFact("fold", text, "folds.toml")


def _upgrades(op: str) -> Iterator[OpFact]:
    """Yield the versions of the op, and what upgrades to them change."""
    if "::" in op:
        return
    rows = upgrade_rows(op)
    schemas = get_all_schemas_with_history()
    own = (schema for schema in schemas if (schema.domain, schema.name) == ("", op))
    versions = {schema.since_version for schema in own}
    for version in sorted(versions)[1:]:
        changes = dict(rows.get(version) or {})
        # These say which row it is, and not what it changes.
        changes.pop("ops", None)
        changes.pop("to", None)
        # What the head of the file says of steps without a row.
        text = _words(changes) if changes else "nodes stay as they are"
        yield OpFact("upgrade", f"to version {version}: {text}", "upgrades.toml")


def _relations(op: str) -> Iterator[OpFact]:
    """Yield how dimensions and exponents of inputs and outputs depend on each other."""
    for rule in dimension_rules().get(op, ()):
        terms = rule.inputs or (() if rule.every is None else (rule.every,))
        shown = [" ".join(term) if term is not None else "any" for term in terms]
        text = ", ".join(f"[{one}]" for one in shown) or "see the row"
        yield OpFact("shapes", f"inputs {text}", "dimensions.toml")
    exponents = exponent_rules().get(op)
    if exponents is not None and exponents.same:
        yield OpFact("exponents", "all float ports share one", "exponents.toml")
    elif exponents is not None:
        sides = (" = ".join(map(_sum, sides)) for sides in exponents.equations)
        yield OpFact("exponents", "; ".join(sides) or "any", "exponents.toml")


def _sum(side: tuple[Term, ...]) -> str:
    """Return a side of an equation as in the table."""
    terms = list[str]()
    for number, is_output, position in side:
        port = f"{'y' if is_output else 'x'}{'*' if position == ALL else position}"
        terms.append(port if number == 1 else f"{number} {port}")
    return " + ".join(terms) or "0"


def _quantized(op: str) -> Iterator[OpFact]:
    """Yield the float form of an op on integers."""
    if op in OPERATORS:
        text = f"the form of {OPERATORS[op].op} for integers"
        yield OpFact("quantized", text, "operators.toml")


def _words(value: Any) -> str:
    """Return a value of a table in a line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, range):
        return "all"
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value)))
    if hasattr(value, "_asdict"):
        columns = value._asdict().items()
        given = {key: item for key, item in columns if item not in (None, ())}
        return f"({_words(given)})"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return str(value)


_TOPICS: Final[tuple[Callable[[str], Iterator[OpFact]], ...]] = (
    _lists,
    _hazards,
    _exactness,
    _kernels,
    _of_targets,
    _gradients,
    _bounds,
    _folds,
    _upgrades,
    _relations,
    _quantized,
)
"""The functions that gather facts, in the order of reports."""
