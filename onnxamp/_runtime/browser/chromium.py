"""Finding, starting and ending Chromium. ``_data/browser.toml`` holds its names and flags.

All users of a machine can read the arguments of a process. So Chromium is not started with the address of its page,
which holds a key, but told it by its debugging pipe or, on Windows, by a file that only its own user can read.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from onnxamp._errors import RuntimeFailure
from onnxamp._ops.tables import read_table

CHROMIUM: Final = "ONNXAMP_CHROMIUM"
"""The variable that holds what starts it: an executable, with arguments of its own if need be."""

_PATIENCE: Final = 5.0
"""Seconds that Chromium may take to end."""
_HIGH: Final = 10
"""Numbers of files from here on are not those that Chromium expects its pipes at."""
_LAUNCH: Final = """
import os, sys
first, second, *command = sys.argv[1:]
os.dup2(int(first), 3)
os.dup2(int(second), 4)
os.execv(command[0], command)
"""
"""What becomes Chromium, with its debugging pipes at 3 and 4."""


def find_chromium() -> str | None:
    """The executable; None if there is none."""
    own = _facts()
    places = (place for place in own.get("places", ()) if Path(place).is_file())
    return next(filter(None, (*map(shutil.which, read_table("browser")["names"]), *places)), None)


def _facts() -> Mapping[str, Any]:
    """What the table says of this system."""
    found: Mapping[str, Any] = read_table("browser")["systems"].get(sys.platform, {})
    return found


def _command(*, is_software: bool) -> list[str]:
    """Chromium and its flags.

    Raises:
        RuntimeFailure: there is no Chromium.
    """
    if named := shlex.split(os.environ.get(CHROMIUM, ""), posix=sys.platform != "win32"):
        command = [shutil.which(named[0]) or "", *named[1:]]
        wrong = f"{named[0]!r}, which {CHROMIUM} names, is no program"
    else:
        command = [find_chromium() or ""]
        wrong = f"no Chromium is installed; apt-get install chromium installs it, and {CHROMIUM} may name another one"
    if not command[0]:
        raise RuntimeFailure(f"The provider 'browser' cannot be used here: {wrong}.")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses to start as root with it
    table = read_table("browser")
    return [
        *command,
        *table["flags"],
        *(table["on_software"] if is_software else _facts().get("flags", ())),
    ]


class Chromium:
    """A running Chromium with a profile of its own, which goes with it.

    It ends with this process, however that ends: Chromium ends when nobody holds the other side of its debugging pipe.
    """

    def __init__(self, url: str, *, is_software: bool = False) -> None:
        """Start it with a page, on the GPU unless ``is_software`` asks for its own software adapter.

        Raises:
            RuntimeFailure: there is no Chromium, or it cannot be started.
        """
        command = _command(is_software=is_software)
        self._profile = Path(mkdtemp(prefix="onnxamp-browser-"))
        self._pipe: tuple[int, ...] = ()
        command.append(f"--user-data-dir={self._profile}")
        try:
            if os.name == "posix":
                self._process = self._piped([*command, "--remote-debugging-pipe", "about:blank"])
                self._show(url)
            else:
                self._process = _silent([*command, _start_page(self._profile, url)])
        except OSError as error:
            self._tidy()
            raise RuntimeFailure(
                f"Chromium ({command[0]}) cannot be started: {error.strerror}."
            ) from error

    def _piped(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start it with pipes at the numbers where it expects them."""
        import fcntl  # noqa: PLC0415 - POSIX alone

        (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
        self._pipe = (our_in, our_out)
        theirs = [
            fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _HIGH) for number in (their_in, their_out)
        ]
        try:
            launch = [sys.executable, "-IS", "-c", _LAUNCH, *map(str, theirs), *command]
            return _silent(launch, pass_fds=theirs, start_new_session=True)
        finally:
            for number in (their_in, their_out, *theirs):
                os.close(number)

    def _show(self, url: str) -> None:
        """Let it open a page, by a message of the DevTools protocol; one that has ended already reads none."""
        message = {"id": 1, "method": "Target.createTarget", "params": {"url": url}}
        with suppress(BrokenPipeError):
            os.write(self._pipe[1], json.dumps(message).encode() + b"\0")

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it and what it started, and remove its profile."""
        self._tidy()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE if os.name == "posix" else 0)
        with suppress(OSError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _tidy(self) -> None:
        """Let go of the pipes, which ends it."""
        for number in self._pipe:
            os.close(number)
        self._pipe = ()


def _start_page(profile: Path, url: str) -> str:
    """The address of a page that leads to another one; it is in the profile, which only this user can read."""
    page = profile / "start.html"
    page.touch(mode=0o600)
    page.write_text(
        f"<!doctype html><script>location.replace({json.dumps(url)})</script>", encoding="utf-8"
    )
    return page.as_uri()


def _silent(command: Sequence[str], **how: Any) -> "subprocess.Popen[bytes]":
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, **how)
