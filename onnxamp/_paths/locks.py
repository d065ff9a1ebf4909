"""Locks on files and folders, which die with the process that holds them."""

try:
    import fcntl
except ImportError:  # Windows: nothing is locked
    fcntl = None  # type: ignore[assignment]

CAN_LOCK = fcntl is not None
"""Whether the system has such locks."""


def lock(handle: int, *, wait: bool) -> None:
    """Lock what a file descriptor stands for, until it is closed.

    Raises:
        BlockingIOError: without ``wait``: another process holds the lock. OSError: locks do not work there.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
