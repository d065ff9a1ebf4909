"""Kernels of the targets: the types of ops that they take.

The tables (a target's ``kernels.json``) are ONNX Runtime's kernel registries and those of plugins, written by
``scripts/make_kernel_tables.py``, and the answers of engines without a registry (``scripts/ask_types.py``). A row
covers schema version ``sv`` if ``since == sv``, or if ``until`` is given and ``since <= sv <= until``; a row without
``until`` matches exactly. This is ONNX Runtime's own rule (``KernelRegistry::VerifyKernelDef``). It leaves 13 CUDA ops
of opset 22 without a kernel.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._facts.signature import Signature
from onnxamp._facts.tables import holds_in, target_json, target_table
from onnxamp._facts.targets import cpu_of, known_versions, target_of, version_meant

Binding = Mapping[str, str]
"""Type parameter -> type."""


class Kernel(NamedTuple):
    """One registered kernel: the schema versions it covers, and its types per type parameter."""

    since: int
    until: int | None
    types: Mapping[str, frozenset[str]]

    def covers(self, version: int) -> bool:
        """Return whether the kernel is for a schema of this since-version."""
        return self.since == version or (
            self.until is not None and self.since <= version <= self.until
        )

    def takes(self, signature: Signature, bound: Binding) -> bool:
        """Return whether the kernel runs the op with these types. Rows keyed by the name of an input have no effect."""
        if not self.covers(signature.since):
            return False
        return all(
            bound[name] in allowed
            for name, allowed in self.types.items()
            if name in bound
        )


@cache
def kernel_table(provider: str) -> Mapping[str, tuple[Kernel, ...]]:
    """Return op key -> kernels of a provider ("cuda") or builder ("tensorrt"), newest or of a version ("cuda@1.24")."""
    device, at, version = provider.partition("@")
    if at and version != known_versions(device)[-1]:
        return _older_table(device, version)
    data = target_json(device, "kernels")
    return {op: _kernels(rows, data["types"]) for op, rows in data["kernels"].items()}


def _older_table(device: str, version: str) -> Mapping[str, tuple[Kernel, ...]]:
    """Return the table of the next newer version, with differing ops replaced; equal parts are shared."""
    # The history stores differences from the next newer version, because most kernels never change.
    known = known_versions(device)
    table = dict(kernel_table(f"{device}@{known[known.index(version) + 1]}"))
    history = target_json(device, "history")
    for op, rows in history["changes"][version].items():
        if rows is None:
            del table[op]
        else:
            table[op] = _kernels(rows, history["types"])
    return table


def _kernels(
    rows: Sequence[tuple[int, int | None, Mapping[str, list[int]]]],
    names: Sequence[str],
) -> tuple[Kernel, ...]:
    """Return the kernels of an op; ``names`` are the types that its rows refer to by number."""
    kernels = list[Kernel]()
    for since, until, numbers_of in rows:
        types = dict[str, frozenset[str]]()
        for param, numbers in numbers_of.items():
            types[param] = frozenset(names[number] for number in numbers)
        kernels.append(Kernel(since, until, types))
    return tuple(kernels)


def float_types(provider: str, key: str, since: int) -> set[str]:
    """Return the float types that kernels of this version of the op take for any parameter."""
    types = set[str]()
    for kernel in kernel_table(provider).get(key, ()):
        if kernel.covers(since):
            types.update(*kernel.types.values())
    return types & FLOAT_TENSORS


def takes_anywhere(target: str, key: str, type_name: str) -> bool:
    """Return whether the target has a kernel of any version of the op that takes the type."""
    if not target_of(target).limits_types:
        return True
    kernels = kernel_table(target).get(key, ())
    types = chain.from_iterable(kernel.types.values() for kernel in kernels)
    return any(type_name in allowed for allowed in types)


def carries(target: str, key: str, signature: Signature, type_name: str) -> bool:
    """Return whether a control-flow op's kernel on the target, or else on the CPU, passes on values of the type."""
    if not target_of(target).limits_types:
        return True
    for provider in dict.fromkeys((target, cpu_of(target))):
        kernels = kernel_table(provider).get(key, ())
        covering = [kernel for kernel in kernels if kernel.covers(signature.since)]
        if covering:
            # V is the parameter of the values that If, Loop and Scan pass on, in all their schemas.
            return any(
                kernel.takes(signature, {"V": type_name}) for kernel in covering
            )
    return True


def is_consistent(
    signature: Signature, bound: Binding, inputs: Sequence[str | None]
) -> bool:
    """Return whether the input types agree with the schema: one type per parameter, from those it allows."""
    for position, kind in enumerate(inputs):
        port = signature.input(position)
        if kind is None:
            continue
        if port is None:
            return False
        if port.type not in signature.params:
            if port.type != kind:
                return False
            continue
        is_bound = bound[signature.param(port, position)] == kind
        if not is_bound or kind not in signature.params[port.type]:
            return False
    return True


@cache
def float32_accumulators(target: str, dtype: str) -> frozenset[str]:
    """Return the op types whose kernels for a low-precision type accumulate in float32 on a target.

    Ops that lose digits anyway, because they subtract the mean in low precision, are left out. For a target without a
    row, nothing is known.

    Args:
        target: the target, possibly with a version of ONNX Runtime ("cuda@1.24"); the newest known one without it.
        dtype: "float16" or "bfloat16".
    """
    version = version_meant(target)
    return frozenset(
        row["op"]
        for row in target_table(target, "accumulate").get("rows", ())
        if dtype in row["types"]
        and row["accumulator"] == "float32"
        and not row.get("cancels", False)
        and holds_in(row, version)
    )
