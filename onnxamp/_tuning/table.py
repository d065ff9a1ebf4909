"""The candidates of a tuning in a state file: each can be written later, and nothing runs for that."""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, get_type_hints

from onnxamp._convert.plan import plan_json, plan_of
from onnxamp._errors import ArgumentError
from onnxamp._options.options import Options
from onnxamp._runtime.engines import Engine
from onnxamp._state.state import Facts, Part, State, as_data, fingerprint, from_data
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.race import Outcome, checked_pick
from onnxamp._tuning.results import KeptNode, Tuned

TABLES: Final = "candidates of a tuning"
"""The part of the state file."""


@dataclass(frozen=True, slots=True)
class Table:
    """Where the candidates of a tuning are kept: ``asked`` are the arguments that they follow from."""

    part: Part
    asked: Mapping[str, Any]

    def keep(self, outcome: Outcome) -> None:
        """Keep the candidates, with the plan that writes each."""
        rows = [outcome.row(number) for number in range(len(outcome.tuned.candidates))]
        data = [{"plan": plan_json(plan), "kept": as_data(kept)} for plan, kept in rows]
        facts = {
            item.name: getattr(outcome.tuned, item.name)
            for item in fields(Tuned)
            if item.name != "plan"
        }
        self.part[self._key] = {
            "asked": self.asked,
            "tuned": as_data(facts),
            "rows": b64encode(zlib.compress(json.dumps(data).encode())).decode(),
        }

    def picked(self, number: int) -> Tuned | None:
        """The outcome with a candidate of the user's choice, as the table that was shown says; None without a table.

        Raises:
            ArgumentError: there is no such candidate, or the table is that of other arguments.
        """
        if self._key not in self.part:
            self._refuse()
            return None
        data = self.part[self._key]
        (plan, kept), tuned = self._row(data, 0), data["tuned"]
        hints = {name: hint for name, hint in get_type_hints(Tuned).items() if name in tuned}
        facts = {name: from_data(hint, tuned[name]) for name, hint in hints.items()}
        found = Tuned(plan=plan, **facts)
        plan, kept = self._row(data, checked_pick(number, found.candidates))
        error = found.candidates[number].best_known_error
        return replace(
            found,
            plan=plan,
            kept=kept,
            chosen=number,
            error=error,
            held=error <= found.tolerance,
            runs=0,
            recalled=found.recalled + found.runs,
            conversions=0,
            room=found.room if number == found.chosen else None,
        )

    @property
    def _key(self) -> str:
        return fingerprint(json.dumps(self.asked, sort_keys=True))

    @staticmethod
    def _row(data: Mapping[str, Any], number: int) -> tuple[Any, tuple[KeptNode, ...]]:
        row = json.loads(zlib.decompress(b64decode(data["rows"])))[number]
        return plan_of(row["plan"]), from_data(tuple[KeptNode, ...], row["kept"])

    def _refuse(self) -> None:
        """Say what differs from the last table, if there is any.

        Raises:
            ArgumentError: there is one.
        """
        last = next(reversed(list(self.part)), None)
        if last is None:
            return
        known = self.part[last]["asked"]
        changed = [name for name in self.asked if self.asked[name] != known.get(name)]
        told = [f"{name} {known.get(name)}" for name in changed if name != "options"]
        told += ["other options"] if "options" in changed else []
        raise ArgumentError(
            f"The candidates that the state file shows are those of {' and '.join(told)}: a candidate is picked with"
            " the same arguments. Tune without pick (--pick) to see those of these."
        )


def table_of(
    state: State, given: Facts, options: Options, search: Search, engine: Engine
) -> Table | None:
    """Where the candidates are kept that follow from some arguments; None where a function of the user is one.

    Args:
        state: the state file.
        given: what all measurements depend on.
        options: those of the conversion.
        search: how the model is tuned.
        engine: what runs converted models.
    """
    if options.rule is not None:
        return None
    asked = {
        "tolerance": search.tolerance,
        "device": search.device,
        "times": search.times,
        "runs": search.runs,
        "allow_slower": search.allow_slower,
        "provider": engine.name(options.low.name),
        "options": fingerprint(json.dumps(options.as_json(), sort_keys=True)),
    }
    return Table(state.part(TABLES, given), asked)
