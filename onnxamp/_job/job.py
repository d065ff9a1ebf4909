"""A conversion whose questions are answered: what its options asked to measure is measured."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnxamp._convert.plan import Plan
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run

if TYPE_CHECKING:
    from onnxamp._numerics.rounding import WeightRounder
    from onnxamp._tuning.arguments import Search
    from onnxamp._tuning.results import Tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, and everything that decides what becomes of it.

    Attributes:
        model: the model to convert.
        options: the options, with exponents and names of nodes in place of the ranges that they asked for.
        plan: decisions to repeat; None to decide.
        run: where and on what models run, and who helps.
        rounder: rounds weights with compensation where the options ask for it.
        tuned: what level auto found, if that was the level.
        search: how level auto searches where nothing else passes the validation.
    """

    model: Model
    options: Options
    plan: Plan | None = None
    run: Run = field(default_factory=Run)
    rounder: "WeightRounder | None" = None
    tuned: "Tuned | None" = None
    search: "Search | None" = None
