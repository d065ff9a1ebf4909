"""Devices, and execution providers that packages of their own bring: one adapter for ONNX Runtime's plugin interface.

Facts about devices come from the drivers of CUDA and Vulkan alone; no other library is needed or loaded. Functions are
those of the CUDA driver API (docs.nvidia.com/cuda/cuda-driver-api), each of which returns 0 where it succeeds, and of
Vulkan.

A package with a plugin provider has the function ``get_library_path``, and ``get_ep_names`` or ``get_ep_name``. Its
library is registered once per process, and a session of one node shows whether it works. With an ``engine.toml`` in its
folder, the name of a target is short for the package.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from string import Template
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.threads import Once
from onnxamp._facts.tables import target_names, target_table
from onnxamp._runtime.sessions.starting import (
    reason,
    session_options,
    start_session,
    trial,
)

if TYPE_CHECKING:
    import onnxruntime as ort


@cache
def _driver() -> ctypes.CDLL | None:
    """Return the driver's library, initialized; None where there is none."""
    try:
        driver = ctypes.CDLL(
            "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        )
        return driver if driver.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def _device(ordinal: int = 0) -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """Return the driver and its handle of a device; None if there is no such device. Touches no device."""
    driver = _driver()
    device = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    return driver, device


def device_present() -> bool:
    """Return whether the driver is installed and sees a device. Touches no device."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return False
    return count.value > 0


def device_name() -> str:
    """Return the name of the first device ("NVIDIA H100 80GB HBM3"); "CUDA device" if the driver has none."""
    device = _device()
    name = ctypes.create_string_buffer(256)
    if device is None or device[0].cuDeviceGetName(name, 256, device[1]):
        return "CUDA device"
    return name.value.decode(errors="replace")


def compute_capability(ordinal: int = 0) -> tuple[int, int]:
    """Return the compute capability of a device, (9, 0) for an H100; (0, 0) if there is no such device."""
    handle = _device(ordinal)
    major = ctypes.c_int(0)
    minor = ctypes.c_int(0)
    if handle is not None:
        driver, device = handle
        for part, attribute in zip((major, minor), _CAPABILITY, strict=True):
            driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return major.value, minor.value


_CAPABILITY: Final = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


def device_memory_used() -> int | None:
    """Return the bytes of the first device's memory that all processes use; None if the driver does not say.

    Creates the device's primary context, which ONNX Runtime uses as well, and keeps it.
    """
    free = ctypes.c_size_t(0)
    total = ctypes.c_size_t(0)
    with _in_context() as driver:
        if driver is None or driver.cuMemGetInfo_v2(
            ctypes.byref(free), ctypes.byref(total)
        ):
            return None
    return total.value - free.value


def bytes_on_device(pointer: int, size: int) -> bytes:
    """Return a copy of ``size`` bytes of the first device's memory.

    Raises:
        RuntimeFailure: the driver refuses.
    """
    buffer = ctypes.create_string_buffer(size)
    source = ctypes.c_uint64(pointer)
    with _in_context() as driver:
        if driver is None:
            raise RuntimeFailure(
                "The CUDA driver does not give access to the device's memory."
            )
        failed = size and driver.cuMemcpyDtoH_v2(buffer, source, ctypes.c_size_t(size))
    if failed:
        raise RuntimeFailure(
            f"The CUDA driver could not copy {size} bytes from the device (error {failed})."
        )
    return buffer.raw


@contextmanager
def _in_context() -> Iterator[ctypes.CDLL | None]:
    """Yield the driver in the first device's primary context; None where there is none."""
    driver = _driver()
    context = _primary_context()
    if driver is None or context is None or driver.cuCtxPushCurrent_v2(context):
        yield None
        return
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def _primary_context() -> Any:
    """Return a handle of the first device's primary context, retained once; None where there is no device."""
    device = _device()
    context = ctypes.c_void_p()
    if device is None or device[0].cuDevicePrimaryCtxRetain(
        ctypes.byref(context), device[1]
    ):
        return None
    return context


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
    """Return the name of the first software device, or of the GPU with these PCI numbers; None if there is none."""
    for one in _vulkan_devices():
        is_software = one.kind == _CPU
        is_same = (one.vendor, one.device) == (vendor, device)
        if (is_cpu and is_software) or (not is_cpu and is_same):
            return str(one.name.decode(errors="replace"))
    return None


def _vulkan_devices() -> Iterator[_Properties]:
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return
    instance = ctypes.c_void_p()
    info = _InstanceInfo(type=1)
    count = ctypes.c_uint32(0)
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return
    try:
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        for handle in handles[: count.value]:
            properties = _Properties()
            vulkan.vkGetPhysicalDeviceProperties(
                ctypes.c_void_p(handle), ctypes.byref(properties)
            )
            yield properties
    finally:
        vulkan.vkDestroyInstance(instance, None)


_PACKAGE: Final = re.compile(r"onnxruntime-[a-z0-9-]+")


class Plugin(NamedTuple):
    """A package with an execution provider; ``_data/targets/README.md`` explains the fields."""

    package: str
    title: str = ""
    install: str = ""
    environment: Mapping[str, str] = {}
    options: Mapping[str, str] = {}
    hints: Sequence[str] = ()
    kind: str = ""
    kernels: Mapping[str, str] = {}
    nothing: str = ""
    advice: Sequence[Mapping[str, str]] = ()
    lacks: Sequence[str] = ()
    ranked: bool = False
    source: str = ""


class PluginDevice(NamedTuple):
    """A plugin provider that works here.

    Attributes:
        title: its name in reports.
        provider: its name in ONNX Runtime ("WebGpuExecutionProvider").
        device: the device ("llvmpipe (LLVM 15.0.6, 256 bits), software"; "AMD EPYC, float32 kernels").
        devices, options: arguments of sessions.
        session: kept open, so that the device need not be opened again.
        hint: the precision hint ("dynamic": the types of the model decide); "" if they always do.
    """

    title: str
    provider: str
    device: str
    devices: "Sequence[ort.OrtEpDevice]"
    options: Mapping[str, str]
    session: "ort.InferenceSession"
    hint: str = ""

    @property
    def name(self) -> str:
        """Its name in reports: "WebGPU on llvmpipe", "OpenVINO (hint dynamic) on Intel(R) Xeon(R) Platinum 8480+"."""
        return f"{self.title}{f' (hint {self.hint})' if self.hint else ''} on {self.device}"

    def settings(self, threads: int = 0) -> dict[str, str]:
        """Return the options of a session with that many threads; 0 for the engine's choice."""
        return _filled(self.options, self.hint, threads)


@cache
def plugins() -> Mapping[str, Plugin]:
    """Return the plugin providers that have short names, by these."""
    rows = {name: target_table(name, "engine") for name in target_names()}
    return {
        name: Plugin(title=target_table(name, "target")["title"], **row)
        for name, row in rows.items()
        if row
    }


def plugin_called(name: str) -> Plugin | None:
    """Return the plugin of a short name, or of the name of a package, without a hint; None if it can be neither."""
    packages = {plugin.package: plugin for plugin in plugins().values()}
    known = plugins().get(name) or packages.get(name)
    if known is None and _PACKAGE.fullmatch(name):
        return Plugin(name, install=f"pip install {name}")
    return known


def split_hint(name: str) -> tuple[str, str]:
    """Return the name of a plugin and the hint after it, or its default hint.

    Raises:
        ArgumentError: the plugin takes no such hint.
    """
    name, colon, hint = name.partition(":")
    plugin = plugin_called(name)
    hints = () if plugin is None else plugin.hints
    if not colon:
        return name, hints[0] if hints else ""
    if hint not in hints:
        known = f"it takes {', '.join(hints)}" if hints else "it takes none"
        raise ArgumentError(f"The provider {name!r} has no hint {hint!r}: {known}.")
    return name, hint


def engine_called(name: str) -> PluginDevice:
    """Return the engine of a plugin.

    Raises:
        ArgumentError: it takes no such hint.
        RuntimeFailure: it cannot be used here; the message says why, and what to install.
    """
    name, hint = split_hint(name)
    plugin = plugin_called(name)
    device = (
        f"no package is called {name!r}" if plugin is None else _engine(plugin.package)
    )
    if isinstance(device, str):
        raise RuntimeFailure(f"The provider {name!r} cannot be used here: {device}.")
    return device._replace(hint=hint)


def _filled(options: Mapping[str, str], hint: str, threads: int) -> dict[str, str]:
    """Options with the hint and the number of threads in place."""
    return {
        key: Template(text).safe_substitute(hint=hint, threads=threads)
        for key, text in options.items()
    }


def wants_ranks(name: str) -> bool:
    """Return whether this engine is a plugin that only runs models whose inputs have ranks."""
    plugin = plugin_called(name.partition(":")[0])
    return plugin is not None and plugin.ranked


@Once
def _engine(package: str) -> PluginDevice | str:
    """Return the engine that a package brings, or a clause that says why it cannot be used. Tried once."""
    import onnxruntime as ort  # noqa: PLC0415

    plugin = plugin_called(package) or Plugin(package)
    if not hasattr(ort, "register_execution_provider_library"):
        return f"onnxruntime {ort.__version__} does not support plugin providers; upgrade it"
    try:
        module = import_module(package.replace("-", "_"))
        names = (
            module.get_ep_names()
            if hasattr(module, "get_ep_names")
            else [module.get_ep_name()]
        )
        library = module.get_library_path()
    except ImportError:
        return f"the package {package} is not installed; {plugin.install} installs it"
    except AttributeError as error:
        return (
            f"the package {package} is not a plugin provider of ONNX Runtime ({error})"
        )
    with _printed() as printed:
        try:
            devices = _devices(plugin, names, library)
            if not devices:
                return f"{package} finds no device that it can use{f'; {plugin.nothing}' * bool(plugin.nothing)}"
            engine = _start(plugin, devices)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the provider cannot be used
            return _trouble(plugin, str(error) or type(error).__name__, printed())
    return engine


def _devices(plugin: Plugin, names: Sequence[str], library: str) -> list[Any]:
    """Return the provider's devices, best first. Registers its library, unless somebody has registered one before."""
    import onnxruntime as ort  # noqa: PLC0415

    if not any(device.ep_name in names for device in ort.get_ep_devices()):
        # Libraries read these variables when they are loaded; those that the user has set count.
        missing = {
            name: value
            for name, value in plugin.environment.items()
            if name not in os.environ
        }
        os.environ |= missing
        try:
            ort.register_execution_provider_library(plugin.package, library)
        finally:
            for name in missing:
                del os.environ[name]
    devices = [device for device in ort.get_ep_devices() if device.ep_name in names]
    return [one for one in devices if plugin.kind in ("", one.device.type.name)]


def _start(plugin: Plugin, devices: Sequence[Any]) -> PluginDevice:
    options = session_options()
    first = devices[0]
    options.add_provider_for_devices(
        [first], _filled(plugin.options, plugin.hints[0] if plugin.hints else "", 0)
    )
    session = start_session(trial().SerializeToString(), options)
    session.run(None, {"x": np.ones(1, np.float32)})
    title = plugin.title or first.ep_name.removesuffix("ExecutionProvider")
    return PluginDevice(
        title=title,
        provider=first.ep_name,
        device=_device_name(first, plugin),
        devices=[first],
        options=plugin.options,
        session=session,
    )


def _device_name(device: Any, plugin: Plugin) -> str:
    """Return the name of a device: from its driver or the engine if they know it, otherwise its vendor and kind."""
    hardware = device.device
    kind = hardware.type.name
    name = None
    if plugin.environment:
        is_cpu = kind == "CPU"
        name = adapter_name(hardware.vendor_id, hardware.device_id, is_cpu=is_cpu)
    metadata = dict(hardware.metadata) | dict(device.ep_metadata)
    name = (
        name
        or metadata.get("FULL_DEVICE_NAME")
        or metadata.get("Description")
        or f"{hardware.vendor} {kind}".strip()
    )
    if plugin.environment and kind == "CPU":
        return f"{name}, software"
    able = str(metadata.get("OPTIMIZATION_CAPABILITIES", "")).split()
    kernels = [dtype for word, dtype in plugin.kernels.items() if word in able]
    if 0 < len(kernels) < len(plugin.kernels):
        return f"{name}, {' and '.join(kernels)} kernels"
    return str(name)


def _trouble(plugin: Plugin, error: str, printed: str) -> str:
    """Return a clause about a failure, from an exception and the output of libraries."""
    for advice in plugin.advice:
        if advice["says"] in f"{printed}\n{error}":
            return f"{advice['wrong']}; {advice['todo']}"
    return f"ONNX Runtime says: {reason(error)}"


@contextmanager
def _printed() -> Iterator[Callable[[], str]]:
    """Capture standard error, where drivers report what is missing; the result reads what was captured."""
    # Native code writes to the file descriptor itself, so that replacing sys.stderr would catch nothing.
    sys.stderr.flush()
    with TemporaryFile() as file:
        kept = None
        with suppress(OSError):  # there need not be a standard error
            kept = os.dup(2)
            os.dup2(file.fileno(), 2)

        def read() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            if kept is not None:
                os.dup2(kept, 2)
                os.close(kept)
