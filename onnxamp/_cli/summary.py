"""Help and version of the program, which import little so that they appear at once."""

from typing import Final

from onnxamp import _base

COMMANDS: Final = {
    "convert": "Convert MODEL to mixed precision, validate the result, and report.",
    "tune": "Convert as much of MODEL as its measured accuracy allows.",
    "diff": "Run REFERENCE and RESULT on the same inputs, and compare outputs.",
    "check": "Find overflow, missing kernels and hazards in MODELS.",
    "bench": "Time MODELS side by side on the same inputs, and explain slowdowns.",
    "train": "Train MODEL in mixed precision, and write the trained model.",
    "inspect": "Show what is in MODEL, what each level would do, and why.",
    "view": "Write a page that shows what converting MODEL would do.",
    "lists": "Show the op lists of PRESETS [all], with the source of each entry.",
}
"""Command -> the first sentence of its help; ``_data/options.toml`` has the others."""

VERSION: Final = f"onnxamp, version {_base.VERSION}"
HELP: Final = """\
Usage: onnxamp [OPTIONS] COMMAND [ARGS]...

  Mixed precision for ONNX models: convert, validate, compare, tune.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
""" + "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())

ANSWERS: Final = {"--version": VERSION, "--help": HELP, "-h": HELP}
"""Questions that are answered before anything else is imported."""
