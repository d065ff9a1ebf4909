"""``python -m onnxamp``, and the command ``onnxamp``. Signals are obeyed before anything slow is imported."""

import atexit
import gc

from onnxamp._base.signals import obeyed_signals
from onnxamp._base.stack import with_room_for_callees


@with_room_for_callees
def main() -> None:
    """Parse the command line, and run the command."""
    # The end of the process frees all memory. A search for cycles before it takes a twentieth of a short command.
    atexit.register(gc.freeze)
    with obeyed_signals():
        from onnxamp._cli import is_answered, plain_streams  # noqa: PLC0415 - signals are obeyed by then

        with plain_streams():
            if is_answered():
                return
            from onnxamp._cli.command import group  # noqa: PLC0415 - imports click

            group(prog_name="onnxamp")


if __name__ == "__main__":
    main()
