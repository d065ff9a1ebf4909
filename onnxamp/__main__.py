"""``python -m onnxamp``, and the command ``onnxamp``."""

from onnxamp._base.signals import obeyed_signals


def main() -> None:
    """Run the command line. What takes time to import is imported once signals are obeyed."""
    with obeyed_signals():
        from onnxamp._cli import main as command_line  # noqa: PLC0415

        command_line()


if __name__ == "__main__":
    main()
