"""The example of training on several processes equals one process with whole batches."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from repository import ROOT
from train_nets import Array, feeds, mlp

pytest.importorskip("mpi4py", reason="the example needs mpi4py, which the extra 'dev' installs")

SCRIPT = ROOT / "docs" / "how-to" / "average.py"
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def trained(folder: Path, processes: int, level: str) -> tuple[list[float], dict[str, Array]]:
    """Losses and trained weights."""
    assert MPIEXEC is not None
    command = [MPIEXEC, "-n", str(processes), sys.executable, str(SCRIPT), "mlp.onnx", "data.npz", "out.onnx", level]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[0]) for line in done.stdout.splitlines()]
    held = onnx.load(folder / "out.onnx").graph.initializer
    return losses, {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in held}


@pytest.mark.slow
@pytest.mark.parametrize(("level", "near"), [("O0", 1e-6), ("O1", 2e-3)])
def test_two_processes_train_as_one(tmp_path: Path, level: str, near: float) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    np.savez(tmp_path / "data.npz", **feeds(64))
    (one, alone), (two, averaged) = (trained(tmp_path, count, level) for count in (1, 2))
    assert len(one) == len(two) == 4
    np.testing.assert_allclose(two, one, rtol=near)
    for name, array in alone.items():
        np.testing.assert_allclose(averaged[name], array, rtol=near, atol=near)
    start = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in mlp().graph.initializer}
    assert all(np.abs(start[name] - alone[name]).max() > 0.01 for name in start)
