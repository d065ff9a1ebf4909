"""What tuning returns."""

from dataclasses import dataclass

from onnxamp._convert.plan import Plan
from onnxamp._tuning.search import Candidate


@dataclass(frozen=True, slots=True)
class Kept:
    """A node that stays float32: why in a few words, and what was measured."""

    node: str
    op: str
    why: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found.

    ``error`` is the chosen candidate's, of the converted model itself on all samples; ``noise`` the float32 model's
    against itself, None where it need not be known; ``device_noise`` that of the float32 model on CUDA against itself
    on the CPU, None where nothing ran on CUDA; ``ran_on`` names what ran converted models; ``runs`` counts the mask
    runs that were made, ``recalled`` those that an earlier tuning had made; ``conversions`` counts the converted models
    that were judged; ``units`` are nodes that could be low, and ``unseen`` those of them that no sample runs;
    ``chosen`` is the position of the candidate that was written; ``times`` says where the candidates' times come from.
    Errors are in the metric's own unit; for "snr" they are relative L2 errors.

    Example:
        >>> import onnxamp
        >>> _, tuned = onnxamp.tune_model("models/classifier.onnx", 1e-2, count=1, provider="cpu")
        >>> tuned.held, tuned.metric, tuned.samples
        (True, 'rel-l2', 1)
    """

    plan: Plan
    metric: str
    tolerance: float
    inputs: str
    samples: int
    noise: float | None
    device_noise: float | None
    error: float
    ran_on: str
    runs: int
    recalled: int
    conversions: int
    units: int
    unseen: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    chosen: int
    kept: tuple[Kept, ...]
    device: str
    times: str
    held: bool
    """Whether ``error`` is within the tolerance."""
