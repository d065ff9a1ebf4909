"""What is wrong with a file that was named, in words."""

from onnxamp._errors import ArgumentError, MissingFileError


def reason_of(error: BaseException) -> str:
    """What a library or the system says, in one line without its full stop, to follow a colon."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    text = str(getattr(error, "strerror", None) or error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__


def cannot_read(what: str, error: Exception, remedy: str = "") -> ArgumentError:
    """The error to raise where ``error`` kept a file from being read that an argument names.

    Args:
        what: names the file, as in "the plan 'plan.json'".
        error: what was raised.
        remedy: a sentence that follows, unless the file is just not there.
    """
    is_missing = isinstance(error, FileNotFoundError)
    kind = MissingFileError if is_missing else ArgumentError
    return kind(
        f"Cannot read {what}: {reason_of(error)}.{f' {remedy}' if remedy and not is_missing else ''}"
    )
