"""Minimal graphs, one or more for each row of the field notes: what existing tools break."""

from types import MappingProxyType

from . import (
    casts,
    constants,
    containers,
    contrib,
    control_flow,
    inputs_outputs,
    kernels,
    masks,
    networks,
    numerics,
    resizing,
)
from .case import Case

__all__ = ["CASES", "Case"]

_MODULES = (
    casts,
    constants,
    resizing,
    kernels,
    control_flow,
    inputs_outputs,
    containers,
    contrib,
    numerics,
    masks,
    networks,
)
_ALL = tuple(case for module in _MODULES for case in module.CASES)
CASES = MappingProxyType({case.name: case for case in _ALL})
"""Every case by its name."""

if len(CASES) != len(_ALL):
    raise ValueError("two cases have one name")
