"""Devices of targets and their speeds, for estimates of time."""

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError, suggestion
from onnxamp._facts.tables import read_table

DEFAULT_DEVICE: Final = "A100"
"""The device for estimates if none of ``_data/devices.toml`` is installed."""


class Device(NamedTuple):
    """The speed of a device: ``bandwidth`` in bytes, the others in floating-point operations, per microsecond.

    ``products`` is for sums of products in float32, ``float32`` for all other work in float32.
    """

    name: str
    bandwidth: float
    float32: float
    products: float
    low: float


@cache
def devices() -> Mapping[str, Device]:
    """Return the devices of ``_data/devices.toml``, by name."""
    return {name: _device(name, row) for name, row in read_table("devices").items()}


def _device(name: str, row: Mapping[str, float]) -> Device:
    # The table states what data sheets do: GB/s, and TFLOP/s.
    return Device(
        name=name,
        bandwidth=row["bandwidth"] * 1e3,
        float32=row["float32"] * 1e6,
        products=row["products"] * 1e6,
        low=row["low"] * 1e6,
    )


def device_called(name: str) -> Device:
    """Return the device with this name.

    Raises:
        ArgumentError: there is no such device.
    """
    device = devices().get(name)
    if device is None:
        raise ArgumentError(
            f"Unknown device {name!r}: choose one of {', '.join(devices())}.{suggestion(devices(), str(name))}"
        )
    return device


def device_titled(title: str) -> str:
    """Return the device with this title in drivers, such as "NVIDIA A100-SXM4-80GB"; the default device if unknown."""
    words = title.replace("-", " ").split()
    return next((name for name in devices() if name in words), DEFAULT_DEVICE)
