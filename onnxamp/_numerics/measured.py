"""Running a flow part by part with every float that its nodes make measured against what it is rounded from."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnxamp._numerics.results import ValueCheck
from onnxamp._numerics.watch import Watched, classify
from onnxamp._runtime.measure import Measurement, measure
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.side import BUDGET, parts_of, start
from onnxamp._runtime.values import Feed

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(slots=True)
class Measured:
    """What the runs of a flow have given so far; of several runs, measurements of a value add up.

    ``rows`` are the values that are looked at, ``budget`` is the number of bytes that may be held at a time.
    """

    runner: Runner
    rows: Sequence[Watched]
    budget: int = BUDGET
    values: dict[str, Measurement] = field(default_factory=dict)
    inputs: dict[str, Measurement] = field(default_factory=dict)

    def parts(
        self, feeds: Mapping[str, Feed], seen: "Callable[[str, ort.OrtValue], None] | None" = None
    ) -> Iterator[Sequence[int]]:
        """Run the flow; after each part, its nodes. What comes behind a part is run only when it is asked for.

        Args:
            feeds: by input, in the types that the flow takes.
            seen: called with each float input and value that is measured.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run a part.
        """
        flow = self.runner.flow
        side = start(self.runner, feeds, Counter(name for row in self.rows for name in {row.value, row.exact}))
        for name, value in side.values.items():
            if value.is_tensor() and "float" in value.data_type():
                self._add(self.inputs, name, value, value, seen)
        rows = {row.value: row for row in self.rows}
        for part in parts_of(flow, range(len(flow.nodes)), self.budget):
            side.run(part)
            for row in (row for node in part for name in flow.nodes[node].output if (row := rows.get(name))):
                self._add(self.values, row.value, side.values[row.exact], side.values[row.value], seen)
                side.used({row.value, row.exact})
            self.runner.forget()
            yield part

    def _add(
        self,
        into: dict[str, Measurement],
        name: str,
        exact: "ort.OrtValue",
        value: "ort.OrtValue",
        seen: "Callable[[str, ort.OrtValue], None] | None",
    ) -> None:
        found = measure(exact, value, self.runner.provider)
        into[name] = into[name] + found if name in into else found
        if seen is not None:
            seen(name, value)

    def checks(self) -> tuple[ValueCheck, ...]:
        """The values so far, in execution order, and which of them are at fault."""
        return classify(self.runner.flow, self.rows, self.values, self.inputs)
