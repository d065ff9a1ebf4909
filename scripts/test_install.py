"""Build the wheel and the sdist, install the wheel in fresh environments, and use it there as a newcomer would.

python3 scripts/test_install.py

Environments:

* bare: no ONNX Runtime. Models are converted without validation, and all packages together take at most 130 MB.
* existing: the newest ONNX Runtime is there before onnxamp. It is used, and its version is the same afterwards.
* cpu: the extra that brings an ONNX Runtime.
* olive: Olive, which runs the tests of our pass. It needs PyTorch, of which PyPI has the 5 GB build for CUDA. The tests
  are left out where PyTorch's own index, which has one for CPUs, is not reached.

In each, three kinds of model are converted: weights inside, weights in a data file, and a model as text. Start-up is
measured as a ratio to importing onnx, since machines differ.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from bootstrap import BIN, ROOT, Environment, ensure, run

MEGABYTES = 130
"""Of all packages in the bare environment, apart from pip and setuptools, which a virtual environment brings along."""
QUICK = {
    ("onnxamp", "--version"): 1 / 3,
    ("onnxamp", "--help"): 1 / 3,
    ("onnxamp", "convert", "--help"): 0.8,
    ("_ONNXAMP_COMPLETE=bash_complete", "COMP_WORDS=onnxamp convert --ta", "COMP_CWORD=2", "onnxamp"): 0.8,
}
"""Commands that load no model library, with the variables that shells set before them -> the longest that each may take
as a ratio to importing onnx. The first two take about 0.2. The others import click and take about 0.55, or 0.65 on a
machine under load; with onnx they would take more than 1.
"""
RUNS = 5


def output(*command: object, cwd: Path | None = None) -> str:
    """What a command prints; a failure ends the script."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> Path:
    """The wheel, in a folder that also gets the sdist; both are what an index takes."""
    run([str(BIN / "python"), "-m", "build", "--outdir", str(folder), str(ROOT)])
    files = [str(path) for path in sorted(folder.iterdir())]
    run([str(BIN / "python"), "-m", "twine", "check", "--strict", *files])
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, *packages: object) -> Environment:
    """An environment in which packages were installed, one after the other."""
    environment = Environment(folder)
    output(sys.executable, "-m", "venv", folder)
    for package in packages:
        output(environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
    return environment


def models(environment: Environment, folder: Path) -> list[Path]:
    """Three kinds of model."""
    source = ROOT / "models" / "encoder.onnx"
    code = f"""
import onnx
model = onnx.load({str(source)!r})
onnx.save(model, {str(folder / "inside.onnx")!r})
onnx.save(model, {str(folder / "text.onnxtxt")!r})
onnx.save(model, {str(folder / "beside.onnx")!r}, save_as_external_data=True, location="beside.data", size_threshold=0)
"""
    output(environment.python, "-c", code, cwd=folder)
    return [folder / name for name in ("inside.onnx", "text.onnxtxt", "beside.onnx")]


def convert_all(environment: Environment, folder: Path, *, validated: bool) -> None:
    """Convert the models by the command that the wheel installed."""
    for model in models(environment, folder):
        printed = output(environment.bin / "onnxamp", "convert", model, "-o", folder / "out" / f"{model.stem}.onnx")
        is_validated = "match the original" in printed
        assert is_validated is validated, printed
        assert validated or "not validated" in printed, printed


def size(environment: Environment) -> float:
    """Megabytes of all packages apart from those that every virtual environment has."""
    (packages,) = environment.path.glob("[Ll]ib/**/site-packages")
    own = [path for path in packages.iterdir() if not path.name.startswith(("pip", "setuptools", "pkg_resources"))]
    files = (file for path in own for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def seconds(*command: object) -> float:
    """The least time that a command takes."""

    def once() -> float:
        start = perf_counter()
        output(*command)
        return perf_counter() - start

    return min(once() for _ in range(RUNS))


def test_bare(folder: Path, wheel: Path) -> None:
    """The smallest installation converts, and says what it could not do."""
    environment = install(folder / "bare", wheel)
    taken = size(environment)
    convert_all(environment, folder, validated=False)
    imported = seconds(environment.python, "-c", "import onnx")
    print(f"bare: {taken:.0f} MB")
    assert taken <= MEGABYTES, f"{taken:.0f} MB are more than {MEGABYTES}"
    for words, limit in QUICK.items():
        command = [environment.bin / word if word == "onnxamp" else word for word in words]
        ratio = seconds("env", *command) / imported
        print(f"{' '.join(words)}: {ratio:.2f} of the time of importing onnx")
        assert ratio <= limit, f"{' '.join(words)} takes {ratio:.2f} times what importing onnx takes"


def test_existing(folder: Path, wheel: Path) -> None:
    """A runtime that is there is used, and stays what it is."""
    asked = "import importlib.metadata as m; print(m.version('onnxruntime'))"
    environment = install(folder / "existing", "onnxruntime")
    before = output(environment.python, "-c", asked)
    pip = (environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    output(*pip, f"{wheel}[measure]")
    assert output(environment.python, "-c", asked) == before
    convert_all(environment, folder, validated=True)
    print(f"existing: onnxruntime stays {before.strip()}")


def test_cpu(folder: Path, wheel: Path) -> None:
    """The extra brings what validation needs."""
    environment = install(folder / "cpu", f"{wheel}[cpu]")
    convert_all(environment, folder, validated=True)
    print("cpu: validated")


def test_olive(folder: Path, wheel: Path) -> None:
    """Olive runs the pass in its workflows."""
    environment = install(folder / "olive")
    pip = (environment.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    torch = [*map(str, pip), "torch", "--index-url", "https://download.pytorch.org/whl/cpu"]
    if subprocess.run(torch, capture_output=True, check=False).returncode:
        print("olive: left out, as PyTorch for CPUs cannot be installed here")
        return
    output(*pip, f"{wheel}[olive,cpu]", "pytest")
    print("olive:", output(environment.python, "-m", "pytest", "-q", "tests/olive", cwd=ROOT).splitlines()[-1])


if __name__ == "__main__":
    ensure("dev")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        wheel = build(root / "dist")
        for number, test in enumerate((test_bare, test_existing, test_cpu, test_olive)):
            folder = root / str(number)
            (folder / "out").mkdir(parents=True)
            test(folder, wheel)
