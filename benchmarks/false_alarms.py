"""What a conversion keeps in float32 and random samples do not need.

A validated conversion is compared with variants that keep less: one without all that hazards and validation keep, and,
if that one fails, one for each hazard whose nodes are lowered (``--force-low``) and one that is not validated. Each
runs on a thousand random samples, or on as many as a budget of processor seconds allows. If it is right on all of them
on which the result is, what it lowers counts as a false alarm. The original runs once on each sample for all variants.
Traffic is the elements of the float results of nodes, without Casts.
"""

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import onnx
from onnx import ModelProto

import onnxamp
from onnxamp._facts.dtypes import FLOAT, FLOAT16
from onnxamp._facts.ops import op_key
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.sample_diff import result_on
from onnxamp._runtime.engines import SampleCache, Session
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import Run, RunOptions

Facts = dict[str, Any]
Convert = Callable[..., ModelProto]
"""Converts the original, with further options."""

CHUNKS = (0, 1, 10, *range(50, 1001, 50))
"""Numbers of samples after which failures and the budget are looked at, so that a run ends early."""
STEPS = tuple(pairwise(CHUNKS))
MEMORY = 1 << 31
"""Bytes for the outputs of the original."""
SEED = 1_000
"""None of the samples that conversions take have it."""


Reason = Literal["samples", "coverage", "stress"]
"""What made a result fail first: samples, those of other sizes, branches and masks, or those that are made hard."""


def reason_of(failure: str) -> Reason:
    """Return what made a result fail, by the sentence of its validation."""
    if "made to be hard" in failure:
        return "stress"
    return "coverage" if failure.startswith("With ") else "samples"


class Traffic(NamedTuple):
    """Elements of the float results of nodes: in low precision, and in all."""

    low: int
    total: int

    @classmethod
    def of(cls, model: ModelSource, sizes: Mapping[str, int]) -> "Traffic":
        """Return the traffic of a model with these sizes of open dimensions."""
        draw = onnxamp.random_samples(model, dims=sizes).draw
        assert draw is not None
        maker = draw.maker()
        graph = Model.of(model).ask(graph_of)
        shapes = maker.shapes()
        low = total = 0
        for node in graph.nodes:
            if op_key(node.proto) in ("Cast", "Constant"):
                continue
            for value in node.writes:
                size = _size(shapes[value])
                total += size if graph.types[value] in (FLOAT, FLOAT16.tensor) else 0
                low += size if graph.types[value] == FLOAT16.tensor else 0
        return cls(low, total)


def _size(shape: Sequence[Any] | None) -> int:
    size = 1
    for dim in shape or ():
        size *= dim if isinstance(dim, int) else 1
    return size


def samples_of(path: Path, count: int = 1, seed: int = 0) -> Samples:
    """Return random samples as conversions take them, with sizes that the model runs with."""
    return requested_samples(RunOptions(count=count, seed=seed), Model.of(path))


class Trials:
    """Random samples of a model, on which any number of variants is compared with it.

    The outputs of the original are kept for the next variant, as far as they fit in memory.
    """

    def __init__(self, path: Path) -> None:
        model = Model.of(path)
        asked = RunOptions(count=CHUNKS[-1], seed=SEED)
        self._comparison = Comparison.of(
            model, Run(provider="cpu"), draw=lambda original: requested_samples(asked, model, reference=original)
        )
        self._samples = self._comparison.run.samples
        self._outputs = {step: SampleCache((step[1] - step[0]) * MEMORY // CHUNKS[-1]) for step in STEPS}

    def on(self, variant: "Variant", seconds: float) -> Facts:
        """Return whether a sample needs what a variant lowers, and on how many it ran in so many processor seconds.

        On such a sample the variant fails, and what keeps this in float32 does not.
        """
        lowered, kept = (self._opened(model) for model in (variant.model, variant.otherwise))
        start = time.process_time()
        for before, after in STEPS:
            is_fine = self._passes(lowered, before, after)
            for number in range(before, before if is_fine else after):
                alone = number, number + 1
                if not self._passes(lowered, *alone) and self._passes(kept, *alone):
                    return {"fails": True, "samples": number + 1}
            if time.process_time() - start > seconds:
                break
        return {"fails": False, "samples": after}

    def _opened(self, model: ModelProto) -> Session:
        comparison = self._comparison
        opened = result_on(comparison.engine, Model.of(model), comparison.reference, whole=comparison.whole)
        opened.prepare_sample(self._samples[0])
        return opened

    def _passes(self, result: Session, first: int, last: int) -> bool:
        """Return whether a result passes on some samples."""
        comparison = self._comparison
        comparison.reference.outputs = self._outputs.get((first, last)) or SampleCache()
        samples = replace(self._samples, readers=self._samples.readers[first:last])
        there = replace(comparison, run=replace(comparison.run, inputs=samples), _result=result)
        return there.compare(result.model, layers=False).passed


class Variant(NamedTuple):
    """A conversion that keeps less in float32.

    Attributes:
        model: the conversion.
        row: what it lowers in addition, as the results list it.
        otherwise: the conversion that keeps this in float32.
    """

    model: ModelProto
    row: Facts
    otherwise: ModelProto


def false_alarms(
    path: Path,
    validated: Path,
    seconds: float,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    cured: Sequence[str] = (),
    reason: Reason = "samples",
) -> Facts:
    """Return the traffic that a conversion keeps in float32, and how much of it no sample needs.

    Args:
        path: the original.
        validated: its validated conversion.
        seconds: processor seconds for the samples.
        options: what both are converted with.
        cured: the nodes that validation keeps in float32, where it names some.
        reason: what made validation keep nodes in float32, if anything did.
    """
    draw = samples_of(path).draw
    sizes = draw.sizes if draw is not None else {}
    convert = partial(onnxamp.convert_model, path, **options)
    usual = convert()
    traffic = Traffic.of(usual, sizes)
    hazards = _kept_by_hazards(onnxamp.plan_model(path, **options))
    variants = list(_without_a_hazard(convert, hazards, cured, sizes))
    found: Facts = {
        "traffic": traffic.total,
        "low": traffic.low / max(traffic.total, 1),
        "hazards": [variant.row for variant in variants],
        "validation": None,
    }
    result = onnx.load(validated)
    kept = (traffic.low - Traffic.of(result, sizes).low) / max(traffic.total, 1)
    if kept > 0:
        found["validation"] = {"reason": reason, "share": kept}
        if reason == "coverage":  # the sample that needs it is a larger one, or takes another branch
            found["validation"] |= {"fails": True, "samples": 1}
        else:
            variants.append(Variant(usual, found["validation"], result))
    every = [node for nodes in hazards.values() for node in nodes]
    asked = [variant for variant in variants if variant.row["share"] > 0]
    together = Variant(_forced(convert, every), {}, result) if len(asked) > 1 else None
    _judge(asked, together, path, seconds)
    return found


def _kept_by_hazards(plan: onnxamp.Plan) -> Mapping[str, Sequence[str]]:
    """Return the nodes that stay in float32, by the hazard."""
    kinds = dict[str, list[str]]()
    for row in plan.hazards:
        if not row.low:
            kinds.setdefault(row.reason, []).append(row.node)
    return kinds


def _forced(convert: Convert, low: Sequence[str], high: Sequence[str] = ()) -> ModelProto:
    """Return a conversion with some nodes in low precision in spite of hazards, and some in float32."""
    with warnings.catch_warnings(action="ignore", category=onnxamp.OptionWarning):
        kept = [node for node in high if node not in low]
        return convert(force_low=[re.escape(node) for node in low], keep_nodes=kept)


def _without_a_hazard(
    convert: Convert, hazards: Mapping[str, Sequence[str]], cured: Sequence[str], sizes: Mapping[str, int]
) -> Iterator[Variant]:
    """Yield a conversion for each hazard, with its nodes in low precision, and what validation keeps in float32."""
    if not hazards:
        return
    kept = _forced(convert, (), cured)
    before = Traffic.of(kept, sizes)
    for kind, nodes in hazards.items():
        model = _forced(convert, nodes, cured)
        share = (Traffic.of(model, sizes).low - before.low) / max(before.total, 1)
        yield Variant(model, {"hazard": kind, "nodes": len(nodes), "share": share}, kept)


def _judge(variants: Sequence[Variant], together: Variant | None, path: Path, seconds: float) -> None:
    """Note in each row whether samples need what it keeps.

    Args:
        variants: what is judged.
        together: a conversion that lowers all of it, of which one run suffices if no sample needs any.
        path: the original.
        seconds: processor seconds for the samples.
    """
    if not variants:
        return
    trials = Trials(path)
    if together is not None:
        seconds /= 1 + len(variants)
        found = trials.on(together, seconds)
        if not found["fails"]:
            for variant in variants:
                variant.row.update(found)
            return
    for variant in variants:
        variant.row.update(trials.on(variant, seconds))
