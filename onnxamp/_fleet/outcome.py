"""The outcome of converting a folder of models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onnxamp._base.public import Shown
from onnxamp._base.records import record
from onnxamp._convert.misspelled import everywhere
from onnxamp._decide.unmatched import Unmatched
from onnxamp._numerics.differences.metrics import Perplexity, TensorDiff
from onnxamp._numerics.results import Parting

OutcomeName = Literal["converted", "up to date", "failed", "failed before"]


@record
class ModelOutcome:
    """The outcome of one model.

    Attributes:
        name: path of the model below the folder, with slashes.
        outcome: "converted", "up to date", "failed", or "failed before": then nothing was tried.
        low: number of the result's nodes in low precision, wholly or in part.
        nodes: number of its nodes that compute with floats.
        casts: number of Casts that were added.
        error: worst relative L2 error of a float output; None if nothing was compared.
        seconds: how long it took.
        bytes_before: bytes of the weights of the model.
        bytes_after: bytes of the weights of the result, without those that it shares with results before it.
        inputs: description of the inputs on which the models ran.
        message: why it failed, or was not validated.
        healed: why nodes had to stay in float32 to pass validation; "" if none had to.
        kept: these nodes.
        cure: the command that converts the model alone in that way.
        trace: traceback of an unexpected error.
        warnings: sentences about options that cannot be followed.
        notes: sentences about other changes, such as upgrades.
        drawback: what is worse than in the original, in a clause; "" if nothing is.
        gains_nothing: whether nothing is low precision, although the level asks for it.
        unmatched: names in options that match nothing in this model; None if it was not measured.
        outputs: differences of the outputs that are logits.
        tokens, perplexity: of a decoder that ran on texts, as in :class:`onnxamp._numerics.results.DiffReport`.
        hazards: reason -> number of nodes that stay in float32 because they would break in low precision.
    """

    name: str
    outcome: OutcomeName = "failed"
    low: int = 0
    nodes: int = 0
    casts: int = 0
    error: float | None = None
    seconds: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0
    inputs: str = ""
    message: str = ""
    healed: str = ""
    kept: tuple[str, ...] = ()
    cure: str = ""
    trace: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    drawback: str = ""
    gains_nothing: bool = False
    unmatched: tuple[Unmatched, ...] | None = None
    outputs: tuple[TensorDiff, ...] = ()
    tokens: tuple[Parting, ...] = ()
    perplexity: Perplexity | None = None
    hazards: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Whether there is no result, or one that failed its validation, now or before."""
        return self.outcome in ("failed", "failed before")

    @property
    def has_result(self) -> bool:
        """Whether there is a result, even if it failed its validation."""
        return not self.has_failed or bool(self.nodes)


@record
class Shipped:
    """A folder of a known kind, with the other files in it.

    Attributes:
        name: path below the folder that was converted, with slashes; "." is that folder.
        kind: the software that loads such folders, as in "transformers.js".
        copied: paths of the files that are beside the results as they should be, with slashes.
        kept: paths of those that were there in another form, and are as they were.
        left: models that were left out, since their names say that they hold other types of the same network.
        failed: models without a result. If there are any, the folder is as it was before.
        linked: links to files outside the folder, which are not copied.
    """

    name: str
    kind: str
    copied: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class FolderReport(Shown):
    """The outcome of converting a folder.

    Attributes:
        source: the folder with the models.
        target: the folder with the results.
        jobs: number of worker processes.
        seconds: how long it took.
        rows: one per model, sorted by name.
        shipped: folders of a known kind.
        read_again: bytes of weights that several models read from one place, beyond the first of them.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = onnxamp.convert_folder("models", folder, jobs=1, validate=False)
        >>> report.count("converted") == len(report.rows)
        True
    """

    source: Path
    target: Path
    jobs: int
    seconds: float
    rows: tuple[ModelOutcome, ...]
    shipped: tuple[Shipped, ...] = ()
    read_again: int = 0

    @property
    def unmatched(self) -> tuple[Unmatched, ...]:
        """Names in options that match nothing in any examined model."""
        return everywhere(
            row.unmatched for row in self.rows if row.unmatched is not None
        )

    def count(self, outcome: str) -> int:
        """Number of models with that outcome: "converted", "up to date", "failed" or "failed before"."""
        return sum(row.outcome == outcome for row in self.rows)


@record
class FolderProgress:
    """Progress of a run, reported when a model is started (``row`` is None) and when it is done.

    Attributes:
        done: models that are done, including those that were up to date.
        total: models in all.
        running: names of the models that are being converted.
        row: the outcome of the model that is done.
    """

    done: int
    total: int
    running: tuple[str, ...]
    row: ModelOutcome | None


def page_of(pages: Path, name: str) -> Path:
    """Return the page of a model: its path below the folder of the pages."""
    return pages / f"{name}.html"
