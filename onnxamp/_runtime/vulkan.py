"""Names of Vulkan's devices, from its loader alone. Functions are those of the Vulkan specification (version 1.0)."""

import ctypes
from collections.abc import Iterator
from typing import Final

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
        if found.kind == _CPU if is_cpu else (found.vendor, found.device) == (vendor, device):
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
            vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), ctypes.byref(found))
            yield found
    finally:
        vulkan.vkDestroyInstance(instance, None)
