"""The command line: one module per command, imported when the command runs."""

import os
import sys

from onnxamp._cli.summary import ANSWERS


def main() -> None:
    """Parse the command line, and run the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # not every terminal can print every name
    try:
        answer = ANSWERS.get(sys.argv[1]) if len(sys.argv) > 1 else None
        if answer is None:
            from onnxamp._cli.group import group  # noqa: PLC0415 - imports click

            group(prog_name="onnxamp")
        else:
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
    except OSError as error:  # of help, which is printed before there is a command
        if not isinstance(error, BrokenPipeError):  # a closed pipe is no fault
            sys.stderr.write(f"Error: Cannot print: {error.strerror}.\n")
        raise SystemExit(1) from None
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # told by now; Python would try once more at the end, and change the exit code
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open
