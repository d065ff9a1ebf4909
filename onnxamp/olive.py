"""A pass for the workflows of Olive (``pip install "onnxamp[olive]"``).

Olive finds passes in its package configuration. ``python -m onnxamp.olive`` prints Olive's own configuration with this
pass added, for ``olive run --package-config``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from onnxamp._base.optional import require
from onnxamp._facts.targets import targets
from onnxamp._job.convert_file import convert_file
from onnxamp._options.command_line import spelled_fields
from onnxamp._options.options import Options
from onnxamp._options.values import Level

require("olive", "onnxamp.olive needs Olive", "olive")
from olive.common.config_utils import ParamCategory  # noqa: E402 - missing packages are reported by name
from olive.hardware import AcceleratorSpec  # noqa: E402
from olive.model import ONNXModelHandler  # noqa: E402
from olive.model.utils import resolve_onnx_path  # noqa: E402
from olive.package_config import OlivePackageConfig  # noqa: E402
from olive.passes import Pass  # noqa: E402
from olive.passes.pass_config import BasePassConfig, PassConfigParam  # noqa: E402
from olive.resource_path import LocalFile, LocalFolder  # noqa: E402
from olive.search.search_parameter import Categorical  # noqa: E402

__all__ = ["OnnxAmp"]


class OnnxAmp(Pass):  # type: ignore[misc]
    """Convert a model to mixed precision, and validate the result, as :func:`onnxamp.convert_file` does.

    The configuration accepts the arguments of :func:`onnxamp.convert_file` that JSON can represent. Unless ``target``
    is given, the model is converted for the execution provider of Olive's accelerator, or for CUDA if Olive names none.
    A search tries the levels O1 to O3.
    """

    @staticmethod
    def is_accelerator_agnostic(accelerator_spec: AcceleratorSpec) -> bool:
        """Return False: the result depends on the execution provider."""
        del accelerator_spec
        return False

    @classmethod
    def _default_config(
        cls, accelerator_spec: AcceleratorSpec
    ) -> dict[str, PassConfigParam]:
        config = {
            "level": PassConfigParam(
                type_=str,
                default_value="O2",
                search_defaults=Categorical(["O1", "O2", "O3"]),
                description=f"One of {', '.join(Level)}.",
            ),
            "samples": PassConfigParam(
                type_=str,
                category=ParamCategory.PATH,
                description="An .npz file of inputs, or a folder of them. Default: random inputs.",
            ),
            "tolerance": PassConfigParam(
                type_=float, description="Largest relative L2 error of an output."
            ),
            "validation": PassConfigParam(
                type_=bool,
                default_value=True,
                description="Compare the result with the original before it is written.",
            ),
        }
        config |= {
            name: PassConfigParam(
                type_=Any,
                default_value=getattr(Options, name),
                description=row.help,
            )
            for name, row in spelled_fields().items()
        }
        config["target"].default_value = _target_of(accelerator_spec)
        return config

    def _run_for_config(
        self,
        model: ONNXModelHandler,
        config: type[BasePassConfig],
        output_model_path: str,
    ) -> ONNXModelHandler:
        source = Path(model.model_path)
        result = Path(resolve_onnx_path(output_model_path, source.name))
        arguments = config.model_dump()
        is_validated = arguments.pop("validation")
        convert_file(source, result, validate=is_validated, **arguments)
        # Olive gives each result a folder of its own, so further files there are its data files.
        has_data = len(list(result.parent.iterdir())) > 1
        if has_data:
            folder = LocalFolder({"path": result.parent})
            return ONNXModelHandler(folder, onnx_file_name=result.name)
        return ONNXModelHandler(LocalFile({"path": result}))


def _target_of(accelerator_spec: AcceleratorSpec) -> str:
    """Return the onnxamp target of an execution provider."""
    provider = accelerator_spec.execution_provider or ""
    name = provider.removesuffix("ExecutionProvider").lower()
    return name if name in targets() else Options.target


def _package_config() -> dict[str, Any]:
    """Return Olive's package configuration with the pass added."""
    path = Path(OlivePackageConfig.get_default_config_path())
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config["passes"]["OnnxAmp"] = {
        "module_path": "onnxamp.olive.OnnxAmp",
        "supported_providers": ["*"],
        "supported_accelerators": ["*"],
        "supported_precisions": ["fp16", "bf16"],
        "module_dependencies": ["onnxamp[measure]"],
    }
    return config


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(_package_config(), indent=4)}\n")
