"""Facts about devices, from the drivers of CUDA and Vulkan alone: no other library is needed or loaded.

Functions are those of the CUDA driver API (docs.nvidia.com/cuda/cuda-driver-api), each of which returns 0 where it
succeeds, and of Vulkan.
"""

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from onnxamp._errors import RuntimeFailure


@cache
def _driver() -> ctypes.CDLL | None:
    """The driver's library, initialised; None where there is none."""
    try:
        driver = ctypes.CDLL(
            "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        )
        return driver if driver.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def device_present() -> bool:
    """Whether the driver is installed and sees a device. Touches no device."""
    driver, count = _driver(), ctypes.c_int(0)
    return (
        driver is not None
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def device_name() -> str:
    """Name of the first device ("NVIDIA H100 80GB HBM3"); "CUDA device" if the driver does not tell."""
    driver, device, name = _driver(), ctypes.c_int(0), ctypes.create_string_buffer(256)
    if (
        driver is None
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, 256, device)
    ):
        return "CUDA device"
    return name.value.decode(errors="replace")


def compute_capability(ordinal: int = 0) -> tuple[int, int]:
    """Compute capability of a device, (9, 0) for an H100; (0, 0) if there is no such device."""
    driver, device, version = (
        _driver(),
        ctypes.c_int(0),
        (ctypes.c_int(0), ctypes.c_int(0)),
    )
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return 0, 0
    for part, attribute in zip(version, _CAPABILITY, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return version[0].value, version[1].value


_CAPABILITY: Final = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


def device_memory_used() -> int | None:
    """Bytes of the first device's memory in use by all processes; None if the driver does not tell.

    Creates the device's primary context, which ONNX Runtime uses as well, and keeps it.
    """
    driver, context = _driver(), _primary_context()
    if driver is None or context is None or driver.cuCtxPushCurrent_v2(context) != 0:
        return None
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return None if failed else total.value - free.value


def bytes_on_device(pointer: int, size: int) -> bytes:
    """A copy of ``size`` bytes of the first device's memory.

    Raises:
        RuntimeFailure: the driver refuses.
    """
    driver, context, buffer = (
        _driver(),
        _primary_context(),
        ctypes.create_string_buffer(size),
    )
    if driver is None or context is None or driver.cuCtxPushCurrent_v2(context) != 0:
        raise RuntimeFailure("The CUDA driver gives no access to the device's memory.")
    failed = (
        driver.cuMemcpyDtoH_v2(buffer, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        if size
        else 0
    )
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    if failed:
        raise RuntimeFailure(
            f"The CUDA driver could not copy {size} bytes from the device (error {failed})."
        )
    return buffer.raw


@cache
def _primary_context() -> Any:
    """A handle of the first device's primary context, retained once; None where there is no device."""
    driver, device, context = _driver(), ctypes.c_int(0), ctypes.c_void_p()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    return (
        None
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        else context
    )


_CPU: Final = 4
"""VK_PHYSICAL_DEVICE_TYPE_CPU."""


class _Properties(ctypes.Structure):
    """The start of VkPhysicalDeviceProperties; the rest, limits and flags, takes less than the last field."""

    _fields_ = (
        ("api", ctypes.c_uint32),
        ("driver", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint8 * 4096),
    )


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo; its type is number 1."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layers", ctypes.c_uint32),
        ("layer_names", ctypes.c_void_p),
        ("extensions", ctypes.c_uint32),
        ("extension_names", ctypes.c_void_p),
    )


def adapter_name(vendor: int, device: int, *, is_cpu: bool) -> str | None:
    """Name of the first software device, or of the GPU with these PCI numbers; None where Vulkan has none."""
    for found in _devices():
        if (
            found.kind == _CPU
            if is_cpu
            else (found.vendor, found.device) == (vendor, device)
        ):
            return str(found.name.decode(errors="replace"))
    return None


def _devices() -> Iterator[_Properties]:
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return
    instance, info, count = ctypes.c_void_p(), _InstanceInfo(type=1), ctypes.c_uint32(0)
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return
    try:
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        for handle in handles[: count.value]:
            found = _Properties()
            vulkan.vkGetPhysicalDeviceProperties(
                ctypes.c_void_p(handle), ctypes.byref(found)
            )
            yield found
    finally:
        vulkan.vkDestroyInstance(instance, None)
