"""Facts about each target as a whole, from its ``target.toml``: its costs, versions and name.

The folders in ``_data/targets`` define the list.
"""

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, suggestion, warn
from onnxamp._base.optional import has_runtime, require
from onnxamp._facts.dtypes import FLOAT32_BYTES, Format
from onnxamp._facts.tables import (
    device_of,
    is_older,
    ordinal,
    target_json,
    target_names,
    target_table,
)

LAUNCH: Final = 64
"""Fixed cost of a Cast, in cost units, for launching a kernel."""
MAX_ELEMENTS: Final = 1 << 32
"""The largest number of elements that counts for a value; larger numbers are guesses about open dimensions."""


class Costs(NamedTuple):
    """The costs on one target, from its ``target.toml``.

    Attributes:
        bytes_per_unit: memory traffic in bytes that takes as long as one cost unit.
        memory: the number of times that each byte of a weight counts as if a Cast moved it.
        launch: microseconds to start a Cast.
        bandwidth: bytes per microsecond at which a Cast reads and writes.
        host: bytes per microsecond at which nodes without a kernel on the target transfer their values to the CPU,
            compute there, and transfer them back; 0 if the target is the CPU.
    """

    bytes_per_unit: int
    memory: float
    launch: float
    bandwidth: float
    host: float

    @classmethod
    def of(cls, row: Mapping[str, float]) -> "Costs":
        """Return the costs from a table ``[costs]``."""
        # Tables state GB/s; the minimum cut computes in integers, of which one launch is LAUNCH units.
        bandwidth = row["bandwidth"] * 1e3
        return cls(
            bytes_per_unit=round(row["launch"] * bandwidth / LAUNCH),
            memory=row["memory"],
            launch=row["launch"],
            bandwidth=bandwidth,
            host=row.get("host", 0) * 1e3,
        )

    def host_time(self, size: int) -> float:
        """Return the microseconds for a node on the CPU with ``size`` bytes of inputs and outputs."""
        return size / self.host if self.host else 0.0

    def cast(self, count: int, trips: int, low: Format) -> int:
        """Return the cost of running a Cast of ``count`` elements between float32 and a format ``trips`` times."""
        moved = (FLOAT32_BYTES + low.bytes) * min(count, MAX_ELEMENTS)
        return (LAUNCH + moved // self.bytes_per_unit) * trips

    def traffic(self, size: int) -> int:
        """Return the cost of moving ``size`` bytes."""
        return size // self.bytes_per_unit

    def stored(self, size: int) -> int:
        """Return the cost of holding ``size`` bytes of weights."""
        return int(size * self.memory) // self.bytes_per_unit


class Target(NamedTuple):
    """A place where a result can run, in any version.

    Attributes:
        name: its name, and that of its folder.
        title: its name in reports.
        limits_types: whether its kernels limit the types of ops; if not, its kernels are unknown.
        builds: whether an engine is built from the whole model, which one unsupported op prevents.
        fuses_quantized: whether quantized ops become integer kernels only if their scales are float32.
        versioned: whether its kernels are known by version of ONNX Runtime.
        registry: the ONNX Runtime provider whose registry lists its kernels; "" if there is none.
        device: the default device for estimates; "" for the installed GPU.
        costs: the costs of Casts and weights there.
    """

    name: str
    title: str
    limits_types: bool
    builds: bool
    fuses_quantized: bool
    versioned: bool
    registry: str
    device: str
    costs: Costs

    @property
    def has_kernels(self) -> bool:
        """Whether ONNX Runtime runs its nodes one by one, with known kernels."""
        return self.limits_types and not self.builds


@cache
def targets() -> Mapping[str, Target]:
    """Return all targets by name, in their listed order."""
    return {name: _read(name) for name in target_names()}


@cache
def target_of(target: str) -> Target:
    """Return the target for a name that may have a version, as in "cuda@1.24"."""
    return targets()[device_of(target)]


@cache
def with_kernels() -> tuple[str, ...]:
    """Return the targets whose nodes ONNX Runtime runs with known kernels."""
    return tuple(name for name, target in targets().items() if target.has_kernels)


def _read(name: str) -> Target:
    facts = target_table(name, "target")
    return Target(
        name=name,
        title=facts["title"],
        limits_types=facts.get("limits_types", True),
        builds=facts.get("builds", False),
        fuses_quantized=facts.get("fuses_quantized", False),
        versioned=bool(target_json(name, "history")),
        registry=facts.get("registry", ""),
        device=facts.get("device", ""),
        costs=Costs.of(facts["costs"]),
    )


AUTO: Final = "auto"
"""The target that stands for the installed ONNX Runtime."""
CPU: Final = "cpu"
"""The target for nodes that the others leave to ONNX Runtime's CPU provider."""


class Release(NamedTuple):
    """The newest models that a version of ONNX Runtime loads.

    Attributes:
        ir_version: IR version of the file.
        opset: version of ai.onnx.
    """

    ir_version: int
    opset: int


@cache
def known_versions(device: str) -> tuple[str, ...]:
    """Return the versions of ONNX Runtime whose kernels are known for a device, the oldest first.

    They differ, because wheels for the CPU appear before those for CUDA. For a device without versions of its own,
    return the versions that are known for every device that has them.
    """
    if target_of(device).versioned:
        return tuple(reversed(target_json(device, "history")["versions"]))
    common = set(known_versions(CPU))
    for name in with_versions():
        common.intersection_update(known_versions(name))
    return tuple(version for version in known_versions(CPU) if version in common)


def with_versions() -> tuple[str, ...]:
    """Return the targets whose kernels are known by version of ONNX Runtime."""
    return tuple(name for name, target in targets().items() if target.versioned)


def version_meant(target: str) -> str:
    """Return the version of ONNX Runtime that a target names, or else the newest known version for its device."""
    return version_of(target) or known_versions(device_of(target))[-1]


def release(target: str) -> Release:
    """Return the opset and IR version that a target's ONNX Runtime loads, by default the newest ONNX Runtime."""
    device = device_of(target) if target_of(target).versioned else CPU
    facts = target_json(device, "history")["versions"][version_meant(target)]
    return Release(facts["ir"], facts["opset"])


def version_of(target: str) -> str:
    """Return the version of ONNX Runtime that a target names, or "" if it names none."""
    return target.partition("@")[2]


def cpu_of(target: str) -> str:
    """Return the CPU provider beside the target's provider: "cpu@1.24" for "cuda@1.24"; a builder has none.

    It has the same version as the target's provider, whether named or not.
    """
    if target_of(target).builds or device_of(target) == CPU:
        return target
    return f"{CPU}@{version_meant(target)}"


def versioned(device: str, version: str) -> str:
    """Return the target of a device and a version of ONNX Runtime, which may name a patch release.

    A version newer than all known ones for the device gets the kernels of the newest, with a warning.

    Raises:
        ArgumentError: the device has no versions, or the version is unknown.
    """
    if not target_of(device).versioned:
        raise ArgumentError(
            f"The target {device!r} has no versions: only {' and '.join(with_versions())} have."
        )
    known = known_versions(device)
    # Kernels do not change between patch releases.
    parts = version.split(".")
    wanted = ".".join(parts[:2])
    if wanted in known:
        return f"{device}@{wanted}"
    if (
        len(parts) > 1
        and all(part.isdecimal() for part in parts[:2])
        and ordinal(wanted) > ordinal(known[-1])
    ):
        warn(
            [
                f"The kernels of ONNX Runtime {version} are not known yet for {device}: those of {known[-1]} are used."
            ]
        )
        return f"{device}@{known[-1]}"
    raise ArgumentError(
        f"Kernels of ONNX Runtime {version!r} are not known for the target {device!r}: choose a version from"
        f" {known[0]} to {known[-1]}, as in '{device}@{known[-1]}'."
    )


def installed_target() -> str:
    """Return the target of the installed ONNX Runtime: the first target that it was built with.

    Raises:
        ArgumentError: its version is unknown. MissingPackageError: ONNX Runtime is not installed.
    """
    require("onnxruntime", "The target 'auto' needs ONNX Runtime", "cpu")
    import onnxruntime as ort  # noqa: PLC0415 - only this target needs it

    available = ort.get_available_providers()
    device = next(
        (name for name in with_versions() if targets()[name].registry in available),
        CPU,
    )
    return versioned(device, ort.__version__)


def older_installed(target: str) -> str:
    """Return the target in the installed version of ONNX Runtime if that is older than the target's, or else ""."""
    if not has_runtime():
        return ""
    import onnxruntime as ort  # noqa: PLC0415 - only this needs it

    device = device_of(target)
    installed = ".".join(ort.__version__.split(".")[:2])
    known = target_of(device).versioned and installed in known_versions(device)
    if known and is_older(installed, version_meant(target)):
        return f"{device}@{installed}"
    return ""


def check_target(target: object) -> str:
    """Return the target that an argument means: its name, possibly with a version of ONNX Runtime, as in "cuda@1.24".

    A patch release stands for its version, and "auto" for the installed ONNX Runtime.

    Raises:
        ArgumentError: there is no such target.
        ArgumentTypeError: it is not a string.
    """
    if not isinstance(target, str):
        raise ArgumentTypeError(
            f"target must be a string such as 'cuda', not {type(target).__name__}."
        )
    if target == AUTO:
        return installed_target()
    device, at, version = target.partition("@")
    if device not in targets():
        also = "or add a version of ONNX Runtime, as in 'cuda@1.24'"
        raise ArgumentError(
            f"Unknown target {target!r}: choose one of {', '.join(targets())} and {AUTO}, {also}."
            f"{suggestion((*targets(), AUTO), device)}"
        )
    return versioned(device, version) if at else target
