"""Random inputs for which a model's outputs are finite.

Where a model takes a logarithm, a root or an arc of its inputs, most numbers give NaN, and a result cannot be compared
where the original is not a number. So the inputs are drawn again: positive, between 0 and 1, above 1, or negative. The
first of these on which all outputs are finite is taken, or else the one with the fewest elements that are not, if
there are fewer.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import FORMATS
from onnxamp._facts.ops import op_facts
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.domains import Domain
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.inputs.random_inputs import InputMaker
from onnxamp._runtime.inputs.roles import Role
from onnxamp._runtime.sessions.values import check_inputs

_SINGLE: Final = 8
"""Inputs up to which each is tried without a domain, once all of them have one: as many runs of the model."""


def with_finite_outputs(draw: Draw, reference: Session) -> Draw:
    """Return the draw, or one in a domain where the outputs of the reference are finite.

    It runs only if one of its ops is undefined for some numbers, and keeps its outputs of the first sample.

    Raises:
        ArgumentError: a size is given for an unknown dimension, or an impossible one.
    """
    maker = draw.maker()
    names = _free_inputs(maker) if _may_be_undefined(maker) else ()
    before = _spoiled(draw, reference) if names else 0.0
    if not before:
        return draw
    search = _Search(draw, reference, before)
    for domain in Domain:
        search.try_domains(dict.fromkeys(names, domain))
        if not search.share:
            break
    if len(search.domains) <= _SINGLE:
        search.release()
    reference.outputs = search.session.outputs
    return search.draw


def _may_be_undefined(maker: InputMaker) -> bool:
    """Return whether a model has an op that is undefined for some numbers. Functions may hide one."""
    graph = maker.graph
    is_one = next(iter(graph.nodes_of(op_facts().undefined)), None) is not None
    return is_one or bool(graph.model.functions)


def _free_inputs(maker: InputMaker) -> tuple[str, ...]:
    """Return the float inputs that neither their use nor the user restricts."""
    return tuple(
        entry.name
        for value, entry in maker.entries.items()
        if maker.uses[value].role is Role.PLAIN
        and entry.type.tensor_type.elem_type in _FLOATS
        and entry.name not in maker.ranges
    )


_FLOATS: Final = frozenset(
    {
        TensorProto.FLOAT,
        TensorProto.DOUBLE,
        *(low.elem for low in FORMATS.values()),
    }
)


class _Search:
    """Looks for the domains with the smallest share of numbers that are not finite.

    Attributes:
        share: that share, summed up over the outputs.
        draw: the draw in these domains.
        session: the reference, which ran on its first sample.
        domains: the domains by the name of the input.
    """

    def __init__(self, draw: Draw, reference: Session, share: float) -> None:
        self.usual = draw
        self.share = share
        self.draw = draw
        self.session = reference
        self.domains: Mapping[str, Domain] = {}

    def try_domains(
        self, domains: Mapping[str, Domain], *, ties: bool = False
    ) -> None:
        """Take some domains if they are better; ``ties``: or as good."""
        draw = _within(self.usual, domains)
        session = self.session.alone()
        share = _spoiled(draw, session)
        if share < self.share or (ties and share == self.share):
            self.share, self.draw, self.session = share, draw, session
            self.domains = domains

    def release(self) -> None:
        """Leave out the inputs that need no domain."""
        for name in tuple(self.domains):
            rest = {one: kind for one, kind in self.domains.items() if one != name}
            if rest:
                self.try_domains(rest, ties=True)


def _within(draw: Draw, domains: Mapping[str, Domain]) -> Draw:
    """Return a draw with inputs in domains, by name."""
    maker = draw.maker()._replace(domains=domains)
    every = _free_inputs(maker)
    if len(domains) == len(every):
        words = ", ".join(sorted({kind.value for kind in domains.values()}))
    else:
        words = ", ".join(f"{name} {kind.value}" for name, kind in domains.items())
    return Draw.by(maker, draw.seed, draw.sizes, words)._replace(tried=draw.tried)


def _spoiled(draw: Draw, session: Session) -> float:
    """Return the share of numbers that are not finite on the first sample, summed up over the outputs.

    It is 0 if no output has NaN and each has a finite number, since infinities may be meant, as in masked scores. It is
    infinite if the model does not run in a domain, and 0 if it does not run anyway, which the comparison reports.
    """
    try:
        feeds = check_inputs(session.model.proto, draw.make(0))
        outputs = session.run_sample(0, feeds)
    except (OnnxAmpError, MemoryError):
        return np.inf if draw.told else 0.0
    floats = [*session.floats_of(outputs)]
    shares = [float(np.mean(~np.isfinite(array))) for array in floats]
    has_nan = any(bool(np.isnan(array).any()) for array in floats)
    return sum(shares) if has_nan or 1.0 in shares else 0.0
