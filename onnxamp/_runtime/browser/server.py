"""A server for the page, on the loopback address, which serves files and questions.

It serves only its own page: other pages and users do not know the key in its addresses, which appears in no command
line (:mod:`onnxamp._runtime.browser`). Requests from other pages are refused even with the key.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from queue import Empty, Queue
from secrets import compare_digest, token_urlsafe
from threading import Event, Thread
from typing import Any, BinaryIO, Final

import numpy as np

from onnxamp._errors import RuntimeFailure
from onnxamp._runtime.values import Array

_TYPES: Final = {
    ".mjs": "text/javascript",
    ".js": "text/javascript",
    ".wasm": "application/wasm",
    ".html": "text/html",
}
_WAIT: Final = 20.0
"""Seconds that the page waits for a question before it asks again."""
_HOME: Final = "127.0.0.1"
"""This machine's own address, which nothing else can reach."""
_ISOLATED: Final = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}
"""Headers that threads of WebAssembly and exact clocks require."""


class Server:
    """Serves onnxruntime-web, models and questions, and receives answers.

    Attributes:
        shared: files that the page may read, by their names in addresses; bytes or paths.
        key: what addresses begin with.
        questions, answers: what waits for the page, and for who asked it.
        lost: set once the page is gone.
    """

    def __init__(self, web: Path) -> None:
        """``web`` is the folder of onnxruntime-web."""
        self.shared: dict[str, bytes | Path] = {}
        self.lost = Event()
        self._web = web
        self.key = token_urlsafe(16)
        self.questions: Queue[bytes] = Queue()
        self.answers: Queue[bytes] = Queue()
        self._server = _Http(self)
        self._thread = Thread(
            target=self._server.serve_forever,
            args=(0.05,),
            name="onnxamp-browser",
            daemon=True,
        )
        self._thread.start()

    @property
    def host(self) -> str:
        """Its address in requests."""
        return f"{_HOME}:{self._server.server_port}"

    @property
    def url(self) -> str:
        """The page."""
        return f"http://{self.host}/{self.key}/page.html"

    def ask(self, question: bytes) -> None:
        """Put a question to the page."""
        self.questions.put(question)

    def answer(self, seconds: float) -> bytes | None:
        """Return the next answer; None if there is none in that time."""
        with suppress(Empty):
            return self.answers.get(timeout=seconds)
        return None

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def open(self, name: str) -> tuple[BinaryIO, int] | None:
        """Return a file of that name, and its length."""
        folder, _, rest = name.rpartition("/")
        found = self.shared.get(name)
        if folder == "ort" and (self._web / rest).is_file():
            found = self._web / rest
        elif name in ("page.html", "page.js"):
            found = (files(__package__) / name).read_bytes()
        if isinstance(found, Path):
            return found.open("rb"), found.stat().st_size
        return None if found is None else (BytesIO(found), len(found))


class _Http(ThreadingHTTPServer):
    """The server of :class:`Server`, on a free port of this machine's own address."""

    daemon_threads = True

    def __init__(self, owner: Server) -> None:
        self.owner = owner
        super().__init__((_HOME, 0), _Handler)

    def handle_error(self, *_: object) -> None:
        """Ignore broken connections: waiting callers learn that the page is gone."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection of the page."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        name = self._name()
        if name is None:
            self._say(403)
        elif name == "alive":
            self._wait_for_the_end()
        elif name == "next":
            with suppress(Empty):
                self._send(self._owner.questions.get(timeout=_WAIT))
                return
            self._say(204)
        elif (found := self._owner.open(name)) is None:
            self._say(404)
        else:
            with found[0] as stream:
                self._headers(
                    200,
                    found[1],
                    _TYPES.get(Path(name).suffix, "application/octet-stream"),
                )
                shutil.copyfileobj(stream, self.wfile, 1 << 20)

    def do_POST(self) -> None:
        name = self._name()
        if name != "answer":
            self.close_connection = True  # nothing reads what it sends
            self._say(403 if name is None else 404)
            return
        self._owner.answers.put(self.rfile.read(int(self.headers["Content-Length"])))
        self._say(204)

    def _name(self) -> str | None:
        """Return the part of the address after the key; None if the key is wrong, or if another page asks."""
        _, key, *rest = self.path.split("/") if "/" in self.path else ("", "")
        host = self._owner.host
        origin = self.headers.get("Origin")
        is_own = self.client_address[0] == _HOME and self.headers.get("Host") == host
        is_own = is_own and origin in (None, f"http://{host}")
        if is_own and compare_digest(key.encode(), self._owner.key.encode()):
            return "/".join(rest)
        return None

    def _wait_for_the_end(self) -> None:
        """The page holds this connection as long as it lives."""
        self.close_connection = True
        with suppress(OSError):
            self.connection.recv(1)
        self._owner.lost.set()

    def _send(self, data: bytes) -> None:
        self._headers(200, len(data), "application/octet-stream")
        self.wfile.write(data)

    def _say(self, code: int) -> None:
        self._headers(code, 0, "text/plain")

    def _headers(self, code: int, length: int, kind: str) -> None:
        self.send_response(code)
        fields = {"Content-Type": kind, "Content-Length": str(length)} | _ISOLATED
        for field, value in fields.items():
            self.send_header(field, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    @property
    def _owner(self) -> Server:
        assert isinstance(self.server, _Http)
        return self.server.owner


TYPES: Final = [
    "float16",
    "float32",
    "float64",
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
"""Names that onnxruntime-web and NumPy give to types."""


def pack(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """Return a message.

    Raises:
        RuntimeFailure: an array is of a type that onnxruntime-web does not take.
    """
    rows: list[dict[str, Any]] = []
    parts = []
    start = 0
    for name, array in arrays.items():
        is_tensor = isinstance(array, np.ndarray)
        if not is_tensor or (
            array.dtype.name not in TYPES and array.dtype.kind not in "USO"
        ):
            what = array.dtype if is_tensor else "no tensor"
            raise RuntimeFailure(
                f"A browser cannot be fed {name!r}: onnxruntime-web takes tensors, but this is {what}."
            )
        row: dict[str, Any] = {"name": name, "shape": list(array.shape)}
        if array.dtype.name not in TYPES:
            rows.append(
                row
                | {"type": "string", "texts": [str(item) for item in array.ravel()]}
            )
            continue
        own = np.ascontiguousarray(array).astype(
            array.dtype.newbyteorder("<"), copy=False
        )
        rows.append(
            row | {"type": array.dtype.name, "start": start, "end": start + own.nbytes}
        )
        parts.append(own.tobytes())
        start += own.nbytes
    text = json.dumps({**header, "tensors": rows}).encode()
    return b"".join((len(text).to_bytes(4, "little"), text, *parts))


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Header and arrays of a message; the arrays are copies."""
    behind = 4 + int.from_bytes(message[:4], "little")
    header: dict[str, Any] = json.loads(message[4:behind])
    arrays = {}
    for row in header.pop("tensors", ()):
        if row["type"] == "string":
            array = np.array(row["texts"], object)
        else:
            dtype = np.dtype(row["type"])
            part = message[behind + row["start"] : behind + row["end"]]
            array = np.frombuffer(part, dtype.newbyteorder("<")).astype(dtype)
        arrays[row["name"]] = array.reshape(row["shape"])
    return header, arrays


WEB: Final = "ONNXAMP_ONNXRUNTIME_WEB"
"""The variable that names the package's folder, or one that it is installed in."""

_PACKAGE: Final = "onnxruntime-web"
BUNDLE: Final = "ort.webgpu.bundle.min.mjs"
"""The file behind ``import "onnxruntime-web/webgpu"``, which reads a .wasm file next to it."""


def find_package(name: str, file: str) -> Path | None:
    """Return the folder of an npm package that has a file: in the folder that WEB names, or where Node looks."""
    named = os.environ.get(WEB)
    path = os.environ.get("NODE_PATH", "")
    here = Path.cwd()
    inside = [] if named is None else [Path(named) / "node_modules"]
    inside += [folder / "node_modules" for folder in (here, *here.parents)]
    inside += map(Path, filter(None, path.split(os.pathsep)))
    packages = (folder / name for folder in inside)
    return next((folder for folder in packages if (folder / file).is_file()), None)


def find_web() -> Path:
    """Return the folder with the package's files.

    Raises:
        RuntimeFailure: it is not installed.
    """
    if named := os.environ.get(WEB):
        folder = Path(named)
        inner = [
            folder / "dist",
            folder,
            folder / "node_modules" / _PACKAGE / "dist",
        ]
        wrong = f"{named}, which {WEB} names, does not contain {BUNDLE}"
    else:
        package = find_package(_PACKAGE, f"dist/{BUNDLE}")
        inner = [] if package is None else [package / "dist"]
        wrong = f"the npm package {_PACKAGE} is not installed"
    for folder in inner:
        if (folder / BUNDLE).is_file():
            return folder
    raise RuntimeFailure(
        f"The provider 'browser' cannot be used here: {wrong}; npm install {_PACKAGE} installs it in this folder, and"
        f" {WEB} may name another one."
    )
