"""Ask an engine whether what its kernel table calls good runs, and print what does not.

    python scripts/ask_runs.py cpu --answers FILE       ask what FILE does not hold yet (an engine is a provider)
    python scripts/ask_runs.py webgpu --answers FILE --op Attention
    python scripts/ask_runs.py webgpu --answers FILE --minutes 30    stop after half an hour; the next run goes on

A registry says which types a kernel takes, not what it refuses once it runs. Each form of an op (op_forms.py) that the
table takes is run in float32, and then in every mixture of float32, float16 and bfloat16 that the table takes as well.
A mixture that fails is printed: it becomes a condition of placement.toml, with what the engine says as its source.

The engine runs in another process, with a limit of time for each question: one that it crashes at, or never answers,
costs nothing else. What fails is asked again in a fresh process, since an engine that failed may fail at anything. All
ops take turns. Ops with forms that were not asked when the minutes were over are printed, too.
"""

import argparse
import base64
import itertools
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from ask_types import Answers
from make_kernel_tables import ROOT
from onnx import ModelProto, helper
from op_forms import FLOATS, Form, Types, body_forms, elem, node_forms, random_forms, runtime_forms, runtime_ops

from onnxamp import OnnxAmpError
from onnxamp._facts.dtypes import ELEM_NUMBERS
from onnxamp._facts.targets import older_installed, release
from onnxamp._graph.targets.freedom import Typed, runs_on
from onnxamp._runtime.child import Child
from onnxamp._runtime.servers import answer_with
from onnxamp._runtime.sessions.session import assigned_nodes, make_session, run

EXPORTS = ROOT / "tests" / "exports.toml"
LEFT = "left to the CPU"
ROUND = 4
"""Forms of each op and version that are asked in one round."""
SECONDS = 60
"""How long an engine may take for a question; compiling shaders takes up to 10 seconds."""


class Runner:
    """A provider that runs models, in a process of its own."""

    is_apart = True

    def __init__(self, target: str) -> None:
        self.target = target
        self.child = Child("ask_runs")
        self.is_fresh = True

    def refuses(self, model: ModelProto) -> str:
        """Why it does not run a model; "" if it does."""
        was_fresh = self.is_fresh
        refusal = self._refusal(model)
        if was_fresh or refusal in ("", LEFT):
            return refusal
        self.rest()
        return self._refusal(model)

    def _refusal(self, model: ModelProto) -> str:
        self.is_fresh = False
        data = base64.b64encode(model.SerializeToString()).decode()
        answer = self.child.ask({"target": self.target, "data": data}, seconds=SECONDS)
        if answer is None:
            self.is_fresh = True
            return f"its process {self.child.ended}"
        return str(answer["refusal"])

    def rest(self) -> None:
        """End the process; the next question starts another one."""
        self.child.end()
        self.is_fresh = True


def serve() -> None:
    """Answer whether providers run models."""
    answer_with(_running)


def _running() -> Callable[..., dict[str, Any]]:
    from any_cpu import openvino_trouble  # noqa: PLC0415 - op_forms has found where it is

    openvino_trouble()  # shows it this CPU, whoever made it
    return lambda target, data: {"refusal": refusal(target, ModelProto.FromString(base64.b64decode(data)))}


def refusal(target: str, model: ModelProto) -> str:
    """Why a provider does not run a model; "" if it does."""
    try:
        session = make_session(model, target, optimize=False, record=True)
        left = {op for where, op, _ in assigned_nodes(session) if where == "CPU"}
        if target != "cpu" and model.graph.node[0].op_type in left:
            return LEFT
        run(session, feeds(model))
    except OnnxAmpError as error:
        return str(error)
    return ""


def feeds(model: ModelProto) -> dict[str, Any]:
    """Numbers for the inputs of a model: small floats, and zeros, which are indices of anything."""
    random = np.random.default_rng(0)
    found = {}
    for info in model.graph.input:
        tensor = info.type.tensor_type
        shape = [dim.dim_value for dim in tensor.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        is_float = tensor.elem_type in {ELEM_NUMBERS[elem(kind)] for kind in FLOATS}
        found[info.name] = (random.uniform(0.1, 1, shape) if is_float else np.zeros(shape)).astype(dtype)
    return found


def mixtures(form: Form, target: str) -> Iterator[Types]:
    """The types of a form's floats that the target's table takes, float32 alone first."""
    bound = form.bound()
    params = [name for name, kind in bound.items() if kind in FLOATS]
    for choice in itertools.product(FLOATS, repeat=len(params)):
        types = dict(zip(params, choice, strict=True))
        allowed = form.signature.params
        if any(kind not in allowed.get(name.partition("#")[0], {kind}) for name, kind in types.items()):
            continue
        if runs_on(target, Typed(form.signature, {**bound, **types}, form.model(types).graph.node[0])):
            yield types


def failures(forms: Iterable[Form], answers: Answers) -> Iterator[str]:
    """What the table takes in low precision, but does not run, although it does in float32."""
    table = older_installed(answers.engine.target) or answers.engine.target
    for form in forms:
        try:
            good = list(mixtures(form, table))
        except (OnnxAmpError, onnx.checker.ValidationError, KeyError) as error:
            print(f"{form.name}: {error}", file=sys.stderr)
            continue
        wide = next((types for types in good if set(types.values()) <= {FLOATS[0]}), None)
        if wide is None or len(good) < 2 or answers.of(form.model(wide)):
            continue
        for types in good:
            text = answers.of(form.model(types))
            if text:
                said = ", ".join(f"{name} {elem(kind)}" for name, kind in sorted(types.items()))
                yield f"{form.op} {form.signature.since} ({said}): {form.name}: {text}"


def loadable(forms: Iterable[Form]) -> Iterator[Form]:
    """The forms at an opset that ONNX Runtime loads, where it has this version of the op."""
    newest = release("cpu").opset
    for form in forms:
        if form.op in runtime_ops() or form.opset <= newest:
            yield form
        elif form.signature.since <= newest:
            yield replace(form, opset=newest)


def in_turns(forms: Sequence[Form]) -> list[Form]:
    """The forms in rounds with some of every op, in the versions that exporters write, in the newest, and in others."""
    exports = tomllib.loads(EXPORTS.read_text(encoding="utf-8"))["forms"]
    exported = {(form["op"], onnx.defs.get_schema(form["op"], form["opset"]).since_version) for form in exports}
    newest: dict[str, int] = {}
    for form in forms:
        newest[form.op] = max(newest.get(form.op, 0), form.signature.since)
    seen: dict[tuple[str, int], int] = Counter()
    order = []
    shuffled = Random(0).sample(forms, len(forms))
    for position, form in enumerate(shuffled):
        since = form.signature.since
        rank = 0 if (form.op, since) in exported else 1 if since == newest[form.op] else 2
        order.append((seen[form.op, rank] // ROUND, rank, position))
        seen[form.op, rank] += 1
    return [shuffled[position] for *_, position in sorted(order)]


def main(argv: Sequence[str] | None = None) -> int:
    """Ask; the exit code is 0, or 1 if something does not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("provider", help="the engine, as --provider takes it")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE", help="the answers so far, and new ones")
    parser.add_argument("--op", action="append", default=[], help="ask about this op alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60 * options.minutes
    every = itertools.chain(body_forms(), runtime_forms(), node_forms(), random_forms())
    forms = iter(in_turns([form for form in loadable(every) if not options.op or form.op in options.op]))
    answers = Answers(options.answers, Runner(options.provider))
    found = list(failures(itertools.takewhile(lambda _: time.monotonic() < until, forms), answers))
    answers.engine.rest()
    print("\n".join(found))
    left = Counter(form.op for form in forms)
    if left:
        print(f"forms not asked: {', '.join(f'{op} {count}' for op, count in sorted(left.items()))}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
