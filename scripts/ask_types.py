"""Ask an engine which types its ops take, and write the answers to onnxamp/_data/targets/ENGINE/kernels.json.

    python scripts/ask_types.py tensorrt --answers FILE    ask what FILE does not hold yet, and write the table
    python scripts/ask_types.py openvino --answers FILE    ask a plugin provider
    python scripts/ask_types.py ENGINE --answers FILE --disagreements    show forms that alone are refused
    python scripts/ask_types.py ENGINE --answers FILE --op Conv --op Gemm    ask about these ops again, and keep others

TensorRT-RTX (``pip install tensorrt-rtx-cu12``) builds engines without a GPU. A plugin provider that compiles what it
takes is asked whether it leaves the op to the CPU. How an engine computes is asked by ask_engine.py. Each question is a
model of one node: a *form* of an op (its attributes, its inputs, which of them are constants; op_forms.py) with given
types, built strongly typed. A form is asked in float32 first, and then in every mixture of float32, float16, bfloat16
and double that its schema admits; one that is refused in float32 says nothing about types.

A table has the form that make_kernel_tables.py explains. A row takes a mixture if no form that is built in float32 is
refused with it, in any version of the op, since fewer forms are asked of old ones. Forms under a condition of
placement.toml, which limits types, do not count. Types that are no floats are not asked, and count as taken. Versions
that no form could be made for are as the next newer one.
"""

import argparse
import hashlib
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
from make_kernel_tables import TARGETS, merge
from onnx import ModelProto
from op_forms import (
    ASKED,
    FLOATS,
    Form,
    Types,
    body_forms,
    elem,
    newest_of,
    node_forms,
    random_forms,
    runtime_forms,
    versions,
)

from onnxamp import OnnxAmpError
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import kernel_limit
from onnxamp._facts.signature import Signature
from onnxamp._runtime.building import EngineBuilder
from onnxamp._runtime.sessions.plugins import plugin_called
from onnxamp._runtime.sessions.session import assigned_nodes, make_session

SECONDS = 120
OTHER = "other"
"""A type that is no float, in a mixture."""
FORMS, OLDER = 60, 6
"""Forms that are asked of the newest version of an op, and of each older one."""
LEAN = 2
"""Forms that are asked of the newest version for each thing to leave out, and of older ones where no other is built."""


class TensorRT:
    """TensorRT's builder."""

    target = "tensorrt"
    is_apart = True

    def __init__(self) -> None:
        self.builder = EngineBuilder()

    def head(self) -> dict[str, str]:
        """What was asked."""
        return {"tensorrt_rtx": version("tensorrt-rtx-cu12")}

    def refuses(self, model: ModelProto) -> str:
        """Why it refuses a model; "" if it does not."""
        built = self.builder.build(model, seconds=SECONDS)
        return built.refusals[0].text if built.refusals else ""

    def rest(self) -> None:
        """Give back memory, which the builder does not by itself."""
        self.builder.end()


class Plugin:
    """A plugin provider that compiles what it takes, and has no registry of kernels."""

    is_apart = False

    def __init__(self, target: str) -> None:
        self.target = target

    def head(self) -> dict[str, str]:
        """What was asked."""
        found = plugin_called(self.target)
        assert found is not None
        return {"package": f"{found.package} {version(found.package)}"}

    def refuses(self, model: ModelProto) -> str:
        """Why it leaves a model to the CPU, or does not load it; "" if it runs it."""
        try:
            session = make_session(model, self.target, optimize=False)
        except OnnxAmpError as error:
            return str(error)
        left = any(where == "CPU" for where, op, _ in assigned_nodes(session) if op == model.graph.node[0].op_type)
        return "left to the CPU" if left else ""

    def rest(self) -> None:
        """It needs none."""


class Answers:
    """What an engine said of models, in a file that grows."""

    def __init__(self, path: Path, engine: TensorRT | Plugin) -> None:
        self.path, self.engine, self.open = path, engine, path.with_suffix(".open")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.known: dict[str, str] = dict(json.loads(line) for line in lines)
        if self.open.exists() and engine.is_apart:  # somebody ended the last run
            self.open.unlink()
        elif self.open.exists():  # the question that the last run crashed at
            self._keep(self.open.read_text(encoding="utf-8"), "it crashes")
        self.asked = 0

    def of(self, model: ModelProto) -> str:
        """Why the builder refuses a model; "" if it does not."""
        data = model.SerializeToString(deterministic=True)
        key = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        if key not in self.known:
            self.open.write_text(key, encoding="utf-8")
            self._keep(key, self.engine.refuses(model))
            self.asked += 1
            if self.asked % 200 == 0:
                self.engine.rest()
                print(f"{self.asked} questions", file=sys.stderr, flush=True)
        return self.known[key]

    def _keep(self, key: str, answer: str) -> None:
        self.known[key] = answer
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, answer]) + "\n")
        self.open.unlink()


@dataclass(frozen=True)
class Answer:
    """What the builder said of a form in every mixture of float types; only forms that it builds in float32."""

    form: Form
    refusals: Mapping[frozenset[tuple[str, str]], str]


def ask(form: Form, answers: Answers, asked: Sequence[str] = ASKED) -> Answer | None:
    """The answers about a form in mixtures of types; None if it is refused as it is."""
    bound = form.bound()
    if answers.of(form.model({})):
        return None
    params = [name for name, kind in bound.items() if kind in ASKED]
    others = frozenset((name, OTHER) for name, kind in bound.items() if kind not in ASKED)
    refusals = {}
    for choice in itertools.product(asked, repeat=len(params)):
        types = dict(zip(params, choice, strict=True))
        if all(kind in allowed(form.signature, name) for name, kind in types.items()):
            refusals[others.union(types.items())] = answers.of(form.model(types))
    return Answer(form, refusals)


def allowed(signature: Signature, param: str) -> frozenset[str]:
    return signature.params.get(param.partition("#")[0], frozenset())


def is_limited(target: str, form: Form, types: Types) -> bool:
    """Whether placement.toml says of the form that it is refused with these types."""
    return kernel_limit(target, form.node, types) is not None


# The table


def refused_types(target: str, answers: Iterable[Answer]) -> set[frozenset[tuple[str, str]]]:
    """The mixtures that a form is refused with, but for what placement.toml says."""
    return {
        types for answer in answers for types, text in answer.refusals.items()
        if text and not is_limited(target, answer.form, dict(types))
    }  # fmt: skip


def rows(found: Sequence[Answer], refused: set[frozenset[tuple[str, str]]]) -> list[dict[str, frozenset[str]]]:
    """What all forms of a version take."""
    mixtures = {types for answer in found for types in answer.refusals}
    mixtures = {others for types in mixtures for others in _with_others(types)}
    taken = [dict(types) for types in mixtures if not any(bad <= types for bad in refused)]
    signature = found[0].form.signature
    made = [{name: _types(signature, name, kind) for name, kind in types.items()} for types in taken]
    absent = dict.fromkeys({name for types in mixtures for name, _ in types}, frozenset[str]())  # no type fits them
    return merge([absent | row for row in made if all(row.values())])


def _with_others(types: frozenset[tuple[str, str]]) -> Iterator[frozenset[tuple[str, str]]]:
    """A mixture, and those with other types instead of floats."""
    choices = [[(name, kind), (name, OTHER)] if kind != OTHER else [(name, kind)] for name, kind in types]
    return map(frozenset, itertools.product(*choices))


def _types(signature: Signature, name: str, kind: str) -> frozenset[str]:
    """The types that an entry of a mixture stands for."""
    if kind != OTHER:
        return frozenset({kind})
    return frozenset(kind for kind in allowed(signature, name) if kind.startswith("tensor(") and kind not in ASKED)


Kernels = dict[str, list[tuple[int, int | None, Mapping[str, frozenset[str]]]]]
"""Op -> since, until, and types by parameter."""


def kernels_of(target: str, found: Mapping[str, Mapping[int, Sequence[Answer]]]) -> Kernels:
    """The rows of the ops that were asked."""
    kernels: Kernels = {}
    for op, by_version in found.items():
        ranges: list[list[Any]] = []
        refused = refused_types(target, (answer for answers in by_version.values() for answer in answers))
        for since in versions(op):
            source = next((later for later in versions(op) if later >= since and later in by_version), None)
            if source is None:
                source = max(by_version)
            made = sorted(rows(by_version[source], refused), key=_order)
            if ranges and ranges[-1][2] == made:
                ranges[-1][1] = newest_of(op, since)
            else:
                ranges.append([since, newest_of(op, since), made])
        kernels[op] = [(since, until, row) for since, until, made in ranges for row in made]
    return kernels


def kernels_in(data: Mapping[str, Any], but: Collection[str]) -> Kernels:
    """The rows of a table, without those of some ops."""
    return {
        op: [
            (
                since,
                until,
                {param: frozenset(data["types"][index] for index in indices) for param, indices in row.items()},
            )
            for since, until, row in made
        ]
        for op, made in data["kernels"].items()
        if op not in but
    }


def table(head: Mapping[str, Any], kernels: Kernels) -> str:
    """The text of a table."""
    every = [row for made in kernels.values() for _, _, row in made]
    names = sorted({kind for row in every for kinds in row.values() for kind in kinds})
    index = {name: position for position, name in enumerate(names)}
    lines = [
        f"{_json(op)}:" + _json([[since, until, {param: sorted(index[kind] for kind in row[param])
                                                 for param in sorted(row)}] for since, until, row in made])
        for op, made in sorted(kernels.items())
    ]  # fmt: skip
    today = datetime.now(UTC).date().isoformat()
    head = {**head, "onnx": onnx.__version__, "date": today, "types": names}
    return _json(head)[:-1] + ',\n"kernels":{\n' + ",\n".join(lines) + "}}\n"


def _order(row: Mapping[str, frozenset[str]]) -> list[tuple[str, list[str]]]:
    return sorted((name, sorted(types)) for name, types in row.items())


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def disagreements(target: str, found: Mapping[str, Mapping[int, Sequence[Answer]]]) -> Iterator[str]:
    """Forms that are refused with types that another form of the op takes."""
    for op, by_version in found.items():
        for since, answers in by_version.items():
            taken = {types for answer in answers for types, text in answer.refusals.items() if not text}
            for answer in answers:
                for types, text in answer.refusals.items():
                    if text and types in taken and not is_limited(target, answer.form, dict(types)):
                        said = ", ".join(f"{name} {elem(kind)}" for name, kind in sorted(types))
                        yield f"{op} {since} ({said}): {answer.form.name}: {text}"


def ask_all(forms: Iterable[Form], answers: Answers) -> dict[str, dict[int, list[Answer]]]:
    """Op -> version -> what its forms answered."""
    found: dict[str, dict[int, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    for form in forms:
        known = found[form.op][form.signature.since]
        if _is_enough(form, known):
            continue
        is_whole = any(not answer.form.lean for answer in known)
        try:
            answer = ask(form, answers, FLOATS if form.lean and is_whole else ASKED)
        except onnx.checker.ValidationError as error:
            print(f"{form.name}: {error}", file=sys.stderr)
            continue
        if answer is not None:
            known.append(answer)
    built = {op: {since: made for since, made in rows.items() if made} for op, rows in found.items()}
    return {op: rows for op, rows in built.items() if rows}


def _is_enough(form: Form, known: Sequence[Answer]) -> bool:
    """Whether enough forms like this one were built in its version of the op."""
    kinds = {kind for kind, _, _ in form.inputs.values()}
    has_floats = not kinds.isdisjoint(FLOATS) or form.op in op_facts().dtype_attribute
    is_newest = form.signature.since == versions(form.op)[-1]
    alike = sum(answer.form.lean == form.lean for answer in known)
    if not has_floats:
        return bool(known)
    if not form.lean:
        return alike >= (FORMS if is_newest else OLDER)
    if is_newest:
        return alike >= LEAN
    return any(not answer.form.lean for answer in known) or len(known) >= OLDER


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and write the table; the exit code is 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", help="tensorrt, or the name of a plugin provider")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE", help="the answers so far, and new ones")
    parser.add_argument("--to", type=Path, default=TARGETS, metavar="DIR", help="write DIR/ENGINE/kernels.json")
    parser.add_argument("--disagreements", action="store_true", help="show them, and write nothing")
    parser.add_argument("--op", action="append", default=[], help="ask about this op, and keep the rows of others")
    options = parser.parse_args(argv)
    every = itertools.chain(body_forms(), runtime_forms(), node_forms(), random_forms())
    forms = (form for form in every if not options.op or form.op in options.op)
    engine = TensorRT() if options.engine == TensorRT.target else Plugin(options.engine)
    found = ask_all(forms, Answers(options.answers, engine))
    if options.disagreements:
        print("\n".join(disagreements(engine.target, found)))
        return 0
    path = options.to / engine.target / "kernels.json"
    kept = kernels_in(json.loads(path.read_text(encoding="utf-8")), options.op) if options.op else {}
    text = table(engine.head(), kept | kernels_of(engine.target, found))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
