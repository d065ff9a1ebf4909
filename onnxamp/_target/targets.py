"""What is known of each target as a whole, from its ``target.toml``; the folders of ``_data/targets`` are the list."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from onnxamp._ops.targets import device_of, target_json, target_names, target_table
from onnxamp._target.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a result can run, of whatever version.

    Attributes:
        name: its name, which is that of its folder.
        title: what reports call it.
        limits_types: whether its kernels limit which types ops may have; they are not known where they do not.
        builds: whether an engine is built of a whole model, which is refused for one op that the builder does not take.
        versioned: whether its kernels are known by version of ONNX Runtime.
        registry: ONNX Runtime's provider whose registry its kernels are from; "" if they are not from one.
        device: the device of estimates where nobody names one; "" for the GPU that is installed.
        costs: what Casts and weights cost there.
    """

    name: str
    title: str
    limits_types: bool
    builds: bool
    versioned: bool
    registry: str
    device: str
    costs: Costs

    @property
    def has_kernels(self) -> bool:
        """Whether ONNX Runtime runs its nodes one by one, on kernels that are known."""
        return self.limits_types and not self.builds


@cache
def targets() -> Mapping[str, Target]:
    """All targets by name, in the order in which they are listed."""
    return {name: _read(name) for name in target_names()}


@cache
def target_of(target: str) -> Target:
    """The target of a name that may have a version, as "cuda@1.24"."""
    return targets()[device_of(target)]


@cache
def with_kernels() -> tuple[str, ...]:
    """The targets whose nodes ONNX Runtime runs on kernels that are known."""
    return tuple(name for name, target in targets().items() if target.has_kernels)


def _read(name: str) -> Target:
    facts = target_table(name, "target")
    return Target(
        name=name,
        title=facts["title"],
        limits_types=facts.get("limits_types", True),
        builds=facts.get("builds", False),
        versioned=bool(target_json(name, "history")),
        registry=facts.get("registry", ""),
        device=facts.get("device", ""),
        costs=Costs.of(facts["costs"]),
    )
