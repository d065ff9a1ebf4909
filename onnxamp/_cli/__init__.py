"""The command line: one module per command, imported when the command runs."""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from onnxamp._cli.summary import ANSWERS

_PLAIN: Final = "onnxamp.plain"
"""The error handler of streams whose encoding lacks signs of the reports."""

_PAIRS: Final = (
    "✔+ ✘x →-> ←<- •- …... ×x −- –- ±+- ≈~ ≤<= ≥>= ∞inf ·* µu ━= ─- █# ▓= ░. │|"
)
_SIGNS: Final = {pair[0]: pair[1:] for pair in _PAIRS.split(" ")}
"""Signs of the reports -> what stands for them where the encoding has only ASCII."""


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Return what to print for signs that an encoding lacks, and where to go on: letters are escaped."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    plain = "".join(_SIGNS.get(sign, ascii(sign)[1:-1]) for sign in lost)
    return plain, error.end


@contextmanager
def plain_streams() -> Iterator[None]:
    """Let the standard streams print reports whatever their encoding, and print what is left at the end."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the start
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - it stays open
        elif hasattr(stream, "reconfigure"):
            codecs.register_error(_PLAIN, _plain)
            stream.reconfigure(errors=_PLAIN)  # not every terminal prints every sign
    try:
        yield
    except OSError as error:  # of help, which is printed before there is a command
        if not isinstance(error, BrokenPipeError):  # a closed pipe is no fault
            sys.stderr.write(f"Error: Cannot print: {error.strerror}.\n")
        raise SystemExit(1) from None
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # told by now; Python would try once more at the end, and change the exit code
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open


def is_answered() -> bool:
    """Print what needs no command, the version and the help, and return whether that was asked for."""
    answer = ANSWERS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if answer is None:
        return False
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()
    return True
