"""The README's comparison with other converters, written from the results that are kept.

    python benchmarks/comparison.py            write the table into README.md
    python benchmarks/comparison.py --check    exit with 1 if it differs, or if the engine changed after it was measured

`--check` is for whoever cuts a release: figures that are older than the last change of the package are not today's.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from measure import engine_commit
from tools import ROOT

Facts = Mapping[str, Any]

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "convert.json"
START, END = "<!-- from benchmarks/comparison.py -->\n", "\n<!-- until here -->"
"""The README's comparison is between these."""
TITLES = {
    "onnxamp": "onnxamp",
    "onnxruntime": "ONNX Runtime's `float16`",
    "onnxconverter-common": "onnxconverter-common",
    "modelopt": "ModelOpt AutoCast",
}
"""The columns, in their order."""
COUNTS = {1: "one core", 2: "two cores"}


def seconds(tool: Facts, *, memory: bool = False) -> str:
    """The time of a tool, and its peak memory if asked for; or why it gave no result."""
    if "failure" in tool:
        return str(tool["failure"])
    parts = [f"{tool['seconds']:.{1 if tool['seconds'] < 10 else 0}f} s"]
    if memory:
        parts.append(f"{tool['peak'] / 1e9:.1f} GB")
    if not tool["loads"]:
        parts.append("does not load")
    return ", ".join(parts)


def error(tool: Facts) -> str:
    """The relative error of a tool's result, or why there is none."""
    if "failure" in tool:
        return str(tool["failure"])
    if not tool["loads"]:
        return "does not load"
    return "1.0 (all wrong)" if tool["error"] >= 1 else f"{tool['error']:.1g}"


def row(title: str, cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join([title, *cells])} |"


def comparison(facts: Facts) -> str:
    """The table, and the sentence that says where, when and with what its figures were measured."""
    models = {found["model"]: found for found in facts["models"]}

    def cells(model: str, show: Any, **how: bool) -> list[str]:
        return [show(models[model]["tools"][tool], **how) for tool in TITLES]

    size = f"{models['bert']['bytes'] / 1e6:.0f} MB"
    lines = [
        row("", list(TITLES.values())).replace("|  |", "| |"),
        "|---" * (len(TITLES) + 1) + "|",
        row(f"BERT-base, {size}: time, peak memory", cells("bert", seconds, memory=True)),
        row("decoder with KV cache: relative error", cells("decoder", error)),
        row(f"{models['stack-5k']['nodes']:,} nodes", cells("stack-5k", seconds)),
        row(f"{models['stack-50k']['nodes']:,} nodes", cells("stack-50k", seconds)),
        row("4 GB of weights", cells("large", seconds, memory=True)),
        "",
        *measured_with(facts),
    ]
    return "\n".join(lines)


def measured_with(facts: Facts) -> list[str]:
    """Say on which machine, when, and with which versions the figures were measured."""
    machine, versions, tools = facts["machine"], facts["versions"], facts["tools"]
    cores = COUNTS.get(machine["cores"], f"{machine['cores']} cores")
    ours, others = tools["onnxamp"]["when"][:10], tools["modelopt"]["when"][:10]
    runtime = versions["onnxruntime"]["onnxruntime"]
    common = versions["onnxconverter-common"]["onnxconverter-common"]
    modelopt = versions["modelopt"]["nvidia-modelopt"]
    onnxamp = f"onnxamp at {tools['onnxamp']['commit']} ({ours})"
    return [
        f"Measured without validation on {cores} of an {machine['processor']}: {onnxamp}, ONNX Runtime {runtime},",
        f"onnxconverter-common {common} and ModelOpt {modelopt}{'' if others == ours else f' ({others})'}.",
    ]


def split(text: str) -> tuple[str, str, str]:
    """What README has before the comparison, the comparison, and what follows it."""
    before, _, rest = text.partition(START)
    shown, _, after = rest.partition(END)
    return before + START, shown, END + after


def main(arguments: Sequence[str] | None = None) -> None:
    """Write or check the table; the exit code is 1 if it is not today's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 if it differs or is older than the engine")
    options = parser.parse_args(arguments)
    facts = json.loads(RESULTS.read_text(encoding="utf-8"))
    before, shown, after = split(README.read_text(encoding="utf-8"))
    written = comparison(facts)
    if not options.check:
        README.write_text(before + written + after, encoding="utf-8")
        return
    faults = []
    if shown != written:
        faults.append("README.md differs from benchmarks/results/convert.json; run python benchmarks/comparison.py.")
    measured, now = facts["tools"]["onnxamp"]["commit"], engine_commit()
    if measured != now:
        faults.append(
            f"The figures are of {measured}, and the package changed last in {now}; run benchmarks/convert.py."
        )
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
