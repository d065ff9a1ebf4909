"""Ask an engine whether what its kernel table calls good runs, and print what does not.

    python scripts/ask_runs.py cpu --answers FILE       ask what FILE does not hold yet (an engine is a provider)
    python scripts/ask_runs.py webgpu --answers FILE --op Attention

A registry says which types a kernel takes, not what it refuses once it runs. Each form of an op (op_forms.py) that the
table takes is run in float32, and then in every mixture of float32, float16 and bfloat16 that the table takes as well.
A mixture that fails is printed: it becomes a condition of placement.toml, with what the engine says as its source.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from ask_types import Answers
from onnx import ModelProto, helper
from op_forms import FLOATS, Form, Types, body_forms, elem, node_forms, random_forms, runtime_forms

from onnxamp import OnnxAmpError
from onnxamp._dtypes import ELEM_NUMBERS
from onnxamp._runtime.session import assigned_nodes, make_session, run
from onnxamp._target.kernels import runs_on


class Runner:
    """A provider that runs models."""

    def __init__(self, target: str) -> None:
        self.target = target

    def refuses(self, model: ModelProto) -> str:
        """Why it does not run a model; "" if it does."""
        try:
            session = make_session(model, self.target, optimize=False, record=True)
            left = {op for where, op, _ in assigned_nodes(session) if where == "CPU"}
            if self.target != "cpu" and model.graph.node[0].op_type in left:
                return "left to the CPU"
            run(session, feeds(model))
        except OnnxAmpError as error:
            return str(error)
        return ""

    def rest(self) -> None:
        """It needs none."""


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
        if runs_on(target, form.op, form.signature, {**bound, **types}, form.model(types).graph.node[0]):
            yield types


def failures(forms: Sequence[Form], answers: Answers) -> Iterator[str]:
    """What the table takes in low precision, but does not run, although it does in float32."""
    for form in forms:
        try:
            good = list(mixtures(form, answers.engine.target))
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


def main(argv: Sequence[str] | None = None) -> int:
    """Ask; the exit code is 0, or 1 if something does not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("provider", help="the engine, as --provider takes it")
    parser.add_argument("--answers", type=Path, required=True, metavar="FILE", help="the answers so far, and new ones")
    parser.add_argument("--op", help="ask about this op alone")
    options = parser.parse_args(argv)
    every = itertools.chain(body_forms(), runtime_forms(), node_forms(), random_forms())
    forms = [form for form in every if options.op in (None, form.op)]
    found = list(failures(forms, Answers(options.answers, Runner(options.provider))))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
