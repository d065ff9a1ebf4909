"""Builds the stand-in for CUDA (cuda.c).

python tests/standin/build.py FOLDER               then run with LD_LIBRARY_PATH=FOLDER
python tests/standin/build.py FOLDER --tensorrt    for TensorRT's libraries as well

One library under all the names that ONNX Runtime's CUDA provider asks for. Linux, a C compiler and nm. With --tensorrt,
ONNX Runtime's TensorRT provider loads as well; if one provider does not load, listing the kernels of all of them ends
the process.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import onnxruntime as ort

HERE = Path(__file__).parent
DRIVER, CUDNN = "libcuda.so.1", "libcudnn.so.9"
TENSORRT = {
    "libnvinfer.so.10": r"(?:create|get)Infer\w+|getPluginRegistry",
    "libnvonnxparser.so.10": r"createNvOnnx\w+",
}
"""Library of TensorRT -> the functions of it that ONNX Runtime's provider calls; they have no versions."""
CALLED = {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"}
"""What onnxamp itself calls of the driver, besides what cuda.c has."""


class NotHereError(Exception):
    """The stand-in cannot be built here; the message says why."""


def build(folder: Path, *, tensorrt: bool = False) -> Path:
    """Build the library in a folder, for ONNX Runtime's TensorRT provider as well if asked to; returns it.

    Raises:
        NotHereError: ONNX Runtime has no CUDA provider here, or there is no compiler.
    """
    provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not provider.exists():
        raise NotHereError("the installed onnxruntime has no CUDA provider")
    written = (HERE / "cuda.c").read_text(encoding="utf-8")
    own = defined(written)
    wanted = wanted_symbols(provider, own)
    if tensorrt:
        for library, found in tensorrt_symbols(provider.with_name("libonnxruntime_providers_tensorrt.so"), own).items():
            wanted[library] = wanted.get(library, set()) | found
    names = {name for found in wanted.values() for name in found}
    source, script, library = folder / "all.c", folder / "versions", folder / "libstandin.so"
    source.write_text(written + "".join(trivial(name) for name in sorted(names - own)), encoding="utf-8")
    script.write_text("".join(version(name, found) for name, found in wanted.items()), encoding="utf-8")
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), f"-Wl,--version-script={script}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotHereError("there is no C compiler") from error
    for name in wanted:
        (folder / name).symlink_to(library.name)
    return library


def wanted_symbols(provider: Path, own: set[str]) -> dict[str, set[str]]:
    """Library -> functions that the provider, or onnxamp, calls; of cuDNN, which is loaded late, those it names.

    Args:
        own: functions that cuda.c defines.
    """
    found: dict[str, set[str]] = defaultdict(set)
    try:
        done = subprocess.run(["nm", "-D", str(provider)], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotHereError("there is no nm") from error
    for kind, symbol in re.findall(r"^ +([Uw]) (\S+)$", done.stdout, re.MULTILINE):
        name, _, library = symbol.partition("@")
        if library.startswith("libcu"):
            found[library].add(name)
        elif kind == "U" and name.startswith("cu"):
            found[DRIVER].add(name)
    found[CUDNN] = {name.decode() for name in re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", provider.read_bytes())}
    found[DRIVER] |= CALLED | {name for name in own if re.match(r"cu[A-Z]", name)}
    needed = subprocess.run(["ldd", str(provider)], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"^\s*(libcu\S+) =>", needed, re.MULTILINE):
        found.setdefault(library, set())  # even one of which nothing is called
    return dict(found)


def tensorrt_symbols(provider: Path, own: set[str]) -> dict[str, set[str]]:
    """Library -> functions of it that the TensorRT provider calls."""
    found = {library: symbols for library, symbols in wanted_symbols(provider, own).items() if library != DRIVER}
    named = subprocess.run(["nm", "-D", str(provider)], check=True, capture_output=True, text=True).stdout
    for library, functions in TENSORRT.items():
        found[library] = set(re.findall(rf"^ +U ({functions})$", named, re.MULTILINE))
    return found


def defined(source: str) -> set[str]:
    """Functions that the source defines."""
    return set(re.findall(r"^[a-z][\w *]*?\b(\w+)\(", source, re.MULTILINE))


def trivial(name: str) -> str:
    """A function that succeeds; what creates something writes a handle where its first argument points."""
    if "Create" in name or name == "cuDevicePrimaryCtxRetain":
        return f"int {name}(void **found) {{ *found = handle; return 0; }}\n"
    return f"int {name}(void) {{ return 0; }}\n"


def version(library: str, names: set[str]) -> str:
    """A version of the library's own name, as NVIDIA's have it."""
    return f"{library} {{ {''.join(f'{name}; ' for name in sorted(names))}}};\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    with_tensorrt = "--tensorrt" in sys.argv[2:]
    target.mkdir(parents=True, exist_ok=True)
    try:
        sys.stdout.write(f"{build(target, tensorrt=with_tensorrt)}\n")
    except NotHereError as reason:
        sys.exit(f"The stand-in for CUDA cannot be built here: {reason}.")
