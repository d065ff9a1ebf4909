"""``python -m onnxamp``, and the command ``onnxamp``."""

from onnxamp._base.signals import obey


def main() -> None:
    """Run the command line. What takes time to import is imported once signals are obeyed."""
    obey(_command_line)


def _command_line() -> None:
    from onnxamp._cli import main as command_line  # noqa: PLC0415

    command_line()


if __name__ == "__main__":
    main()
