"""Models in a browser: what is said where one cannot be used, and what runs in a headless Chromium where one can."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from urllib.parse import urlsplit
from urllib.request import url2pathname

import ml_dtypes
import numpy as np
import onnx
import pytest
from commands import run as run_cli
from onnx import ModelProto, parser
from repository import ROOT

import onnxamp
from onnxamp import ArgumentError, BenchOptions, RuntimeFailure
from onnxamp._runtime.browser import CHROMIUM, Browser, Chromium, _start_page, open_browser
from onnxamp._runtime.browser.server import BUNDLE, TYPES, WEB, Server, find_web, pack, unpack
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.session import choose_provider, make_session


def parse(text: str, opset: int = 17) -> ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> graph {text}')


ENCODER = ROOT / "models" / "encoder.onnx"
SHAPES = ((), (3,), (0, 2), (2, 3, 5))
MIXED = "(float[2, 2] x) => (float y) { s = Mul (x, x) d = Det (s) y = Neg (d) }"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like onnxruntime-web's."""
    folder = tmp_path / "package" / "dist"
    folder.mkdir(parents=True)
    (folder / BUNDLE).write_text("// nothing")
    monkeypatch.setenv(WEB, str(folder.parent))
    return folder


class TestFinding:
    def test_onnxruntime_web_is_found_where_node_finds_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(WEB, raising=False)
        monkeypatch.delenv("NODE_PATH", raising=False)
        installed, below = tmp_path / "node_modules" / "onnxruntime-web" / "dist", tmp_path / "a" / "b"
        for folder in (installed, below):
            folder.mkdir(parents=True)
        monkeypatch.chdir(below)
        with pytest.raises(
            RuntimeFailure, match="'browser' cannot be used here: the npm package onnxruntime-web is not"
        ):
            find_web()
        (installed / BUNDLE).touch()
        assert find_web() == installed
        monkeypatch.chdir(tmp_path.parent)
        monkeypatch.setenv("NODE_PATH", str(tmp_path / "node_modules"))
        assert find_web() == installed

    @pytest.mark.parametrize("named", ["package", "package/dist"])
    def test_a_variable_names_its_folder(self, named: str, web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(WEB, str(web.parents[1] / named))
        assert find_web() == web

    def test_a_folder_without_it_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(WEB, str(tmp_path))
        with pytest.raises(
            RuntimeFailure, match=f"{WEB} names, does not contain {BUNDLE}; npm install onnxruntime-web"
        ):
            find_web()

    @pytest.mark.usefixtures("web")
    def test_a_missing_chromium_is_named_with_what_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(CHROMIUM, "no-such-browser --flag")
        with pytest.raises(RuntimeFailure, match=f"'no-such-browser', which {CHROMIUM} names, is not a program"):
            Browser()
        monkeypatch.delenv(CHROMIUM)
        monkeypatch.setenv("PATH", "")
        if sys.platform == "linux":
            with pytest.raises(RuntimeFailure, match="no Chromium is installed; apt-get install chromium installs it"):
                Browser()

    @pytest.mark.usefixtures("web")
    def test_a_chromium_that_ends_at_once_is_told_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        monkeypatch.setenv(CHROMIUM, f"{sys.executable} -c pass")
        with pytest.raises(RuntimeFailure, match="Chromium ended before it answered"):
            Browser()
        assert not list(tmp_path.glob("onnxamp-browser-*"))

    @pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
    def test_a_chromium_that_hangs_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is told to end by its pipe, as here, or killed with all that it started."""
        script = tmp_path / "hangs.py"
        script.write_text("import os\nwhile os.read(3, 1): pass\n")
        monkeypatch.setenv(CHROMIUM, f"{sys.executable} {script}")
        chromium = Chromium("about:blank")
        assert not chromium.ended()
        chromium.end()
        assert chromium.ended()


class TestUse:
    @pytest.mark.parametrize(
        "command",
        [("check", "model.onnx"), ("convert", "model.onnx", "-o", "other.onnx"),
         ("tune", "model.onnx", "-o", "other.onnx"), ("diff", "model.onnx", "model.onnx", "--layers")],
        ids=lambda command: command[0],
    )  # fmt: skip
    def test_what_runs_pieces_of_models_needs_another_provider(
        self, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        onnx.save(parse(MIXED), "model.onnx")
        result = run_cli(*command, "--provider", "browser")
        assert result.exit_code == 2
        assert "A browser runs only whole models, which is enough for bench and diff" in " ".join(result.output.split())
        assert not Path("other.onnx").exists()

    def test_sessions_of_onnxruntime_are_not_of_a_browser(self) -> None:
        with pytest.raises(ArgumentError, match="only whole models"):
            make_session(parse(MIXED), "browser")
        with pytest.raises(ArgumentError, match="choose one of cuda, cpu, webgpu, openvino, browser"):
            choose_provider("netscape")


class TestMessages:
    @pytest.mark.parametrize("name", TYPES)
    def test_tensors_come_back_as_they_were(self, name: str) -> None:
        rng = np.random.default_rng(0)
        sent = {str(shape): np.array(rng.standard_normal(shape) * 9).astype(name) for shape in SHAPES}
        sent["turned"] = sent[str(SHAPES[-1])].T
        header, found = unpack(pack({"ask": "run"}, sent))
        assert header == {"ask": "run"}
        for key, array in sent.items():
            np.testing.assert_array_equal(found[key], array, strict=True)

    def test_texts_do_too(self) -> None:
        _, found = unpack(pack({}, {"x": np.array([["a", "ä€"], ["", "b"]])}))
        assert found["x"].tolist() == [["a", "ä€"], ["", "b"]]

    def test_other_types_are_refused(self) -> None:
        with pytest.raises(RuntimeFailure, match=r"cannot be fed 'x': .* but this is bfloat16"):
            pack({}, {"x": np.zeros(2, ml_dtypes.bfloat16)})


def got(url: str, data: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, data, timeout=10) as response:
        return bytes(response.read())


class TestServer:
    def test_questions_answers_and_files(self, web: Path) -> None:
        server = Server(web)
        try:
            base = server.url.removesuffix("page.html")
            server.shared["models/0/0"] = b"a model"
            assert b"page.js" in got(server.url)
            assert got(f"{base}ort/{BUNDLE}") == b"// nothing"
            assert got(f"{base}models/0/0") == b"a model"
            server.ask(b"question")
            assert got(f"{base}next") == b"question"
            assert server.answer(0) is None
            got(f"{base}answer", b"answer")
            assert server.answer(10) == b"answer"
        finally:
            server.close()

    def test_only_who_knows_the_key_is_served(self, web: Path) -> None:
        (web.parent / "secret").write_text("secret")
        server = Server(web)
        try:
            base, key, _ = server.url.rsplit("/", 2)
            for path in ("", "page.html", "wrong/page.html", f"{key}x/page.html", "next", "wrong/alive"):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    got(f"{base}/{path}")
            for path in (f"{key}/ort/../secret", f"{key}/models/0/0", f"{key}/ort/"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    got(f"{base}/{path}")
            with pytest.raises(urllib.error.HTTPError, match="403"):
                got(f"{base}/wrong/answer", b"false")
            assert server.answer(0) is None
        finally:
            server.close()

    @pytest.mark.parametrize(
        "headers",
        [{"Origin": "https://example.com"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
         {"Host": "example.com"}, {"Host": "localhost"}],
        ids=str,
    )  # fmt: skip
    def test_other_pages_are_refused_even_if_they_know_the_key(self, web: Path, headers: dict[str, str]) -> None:
        """As a page whose name leads to this machine by now, or one that an address leaked to."""
        server = Server(web)
        try:
            server.ask(b"question")
            for path, data in (("next", None), ("answer", b"false"), ("page.html", None)):
                request = urllib.request.Request(server.url.replace("page.html", path), data, headers)
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(request, timeout=10)
            assert server.answer(0) is None
            own = urllib.request.Request(server.url, headers={"Origin": server.url.rsplit("/", 2)[0]})
            with urllib.request.urlopen(own, timeout=10) as response:
                assert response.status == 200
        finally:
            server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_other_user_can_read_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are public; what is told by the pipe is not."""
    script = tmp_path / "prints.py"
    script.write_text(
        "import os, sys\nmessage = os.read(3, 4096)\nopen(sys.argv[1], 'wb').write(message)\nos.read(3, 1)\n"
    )
    monkeypatch.setenv(CHROMIUM, f"{sys.executable} {script} {tmp_path / 'message'}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    key = token_hex()
    chromium = Chromium(f"http://127.0.0.1:1/{key}/page.html")
    try:
        while not (tmp_path / "message").exists() or not (tmp_path / "message").read_bytes():
            time.sleep(0.01)
        assert key.encode() not in b"".join(arguments_of_all())
        assert key.encode() not in b"".join(readable_by_all(tmp_path, but="message"))
    finally:
        chromium.end()
    message = (tmp_path / "message").read_bytes()
    assert json.loads(message.removesuffix(b"\0"))["params"] == {"url": f"http://127.0.0.1:1/{key}/page.html"}


def arguments_of_all() -> Iterator[bytes]:
    """The command lines of all processes."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield entry.read_bytes()


def readable_by_all(folder: Path, but: str = "") -> Iterator[bytes]:
    """The files below a folder that every user can read."""
    for path in folder.iterdir():
        is_open = not path.is_symlink() and path.stat().st_mode & (0o005 if path.is_dir() else 0o004)
        if is_open and path.is_dir():
            yield from readable_by_all(path)
        elif is_open and path.is_file() and path.name != but:
            yield path.read_bytes()


def test_a_page_that_leads_to_the_address_is_its_users_own(tmp_path: Path) -> None:
    """As on Windows, where there is no such pipe."""
    page = Path(url2pathname(urlsplit(_start_page(tmp_path, "http://127.0.0.1:1/secret/page.html")).path))
    assert page.stat().st_mode & 0o777 == 0o600
    assert 'location.replace("http://127.0.0.1:1/secret/page.html")' in page.read_text()


@pytest.mark.browser
class TestRuns:
    def test_a_model_runs_and_what_is_left_to_the_cpu_is_counted(self) -> None:
        whole = engine_on("browser").open(parse(MIXED), whole=True)
        assert whole.left_to_cpu() == {}
        assert whole.run({"x": np.array([[1, 2], [3, 4]], np.float32), "stranger": np.zeros(1)})["y"] == pytest.approx(
            20
        )
        assert whole.left_to_cpu()["Det"] == 1

    def test_the_report_names_the_device_that_ran(self) -> None:
        name = engine_on("browser").name()
        assert name.startswith("WebGPU on ")
        assert ", in Chromium " in name
        assert " with onnxruntime-web 1." in name

    @pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "bool"])
    def test_types_pass_through(self, dtype: str) -> None:
        kind = {"float32": "float"}.get(dtype, dtype)
        text = f"({kind}[N, 3] x, float z) => ({kind}[N, 3] y, float n) {{ y = Identity (x) n = Neg (z) }}"
        x = np.array([[0, 1, 2], [3, 4, 0]]).astype(dtype)
        found = open_browser().open(parse(text)).run({"x": x, "z": np.float32(2) * np.ones(())})
        np.testing.assert_array_equal(found["y"], x, strict=True)
        assert found["n"] == -2

    def test_weights_in_files(self, tmp_path: Path) -> None:
        weight = np.arange(4096, dtype=np.float32).reshape(64, 64)
        model = parse("(float[2, 64] x) => (float[2, 64] y) { y = MatMul (x, w) }")
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        path = tmp_path / "model.onnx"
        onnx.save(model, path, save_as_external_data=True, location="my weights.bin", size_threshold=0)
        x = np.eye(2, 64, dtype=np.float32)
        np.testing.assert_array_equal(open_browser().open(path).run({"x": x})["y"], weight[:2])

    def test_nothing_runs_on_the_cpu_as_a_whole(self) -> None:
        with pytest.raises(RuntimeFailure, match=r"onnxruntime-web 1\.\S+ runs no node of the model on WebGPU"):
            open_browser().open(parse("(float[2, 2] x) => (float y) { y = Det (x) }"))

    def test_failures_are_one_sentence(self) -> None:
        with pytest.raises(RuntimeFailure, match=r"^onnxruntime-web could not load the model: .*Strange.*\.$") as found:
            open_browser().open(parse("(float[2] x) => (float[2] y) { y = Strange (x) }"))
        assert "\n" not in str(found.value)
        with pytest.raises(RuntimeFailure, match="does not compute bfloat16"):
            open_browser().open(parse("(bfloat16[2] x) => (bfloat16[2] y) { y = Neg (x) }"))
        session = open_browser().open(parse("(float[N, 2] x, float[M, 2] z) => (float[N, 2] y) { y = Add (x, z) }"))
        with pytest.raises(RuntimeFailure, match="needs the input 'z'"):
            session.run({"x": np.zeros((2, 2), np.float32)})
        with pytest.raises(RuntimeFailure, match=r"^onnxruntime-web could not run the model: [A-Z]"):
            session.run({"x": np.zeros((2, 2), np.float32), "z": np.zeros((3, 2), np.float32)})
        both = session.run({"x": np.ones((2, 2), np.float32), "z": np.ones((2, 2), np.float32)})
        assert both["y"].tolist() == [[2, 2], [2, 2]]  # the browser goes on

    @pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
    def test_the_key_is_in_no_command_line_and_no_file_that_others_can_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(mkdtemp())  # Chromium wants short names for its sockets
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr("tempfile.tempdir", None)
        browser = Browser()
        try:
            key = browser.server.key.encode()
            found = list(arguments_of_all())
            assert any(str(browser._chromium._profile).encode() in arguments for arguments in found)
            assert key not in b"".join(found)
            assert key not in b"".join(readable_by_all(folder))
        finally:
            browser.end()
            rmtree(folder)


@pytest.mark.browser
class TestNumbers:
    def test_it_is_a_second_witness_of_float16(self, tmp_path: Path) -> None:
        low = tmp_path / "low.onnx"
        onnxamp.convert_file(ENCODER, low, level="O2", target="webgpu", validate=False)
        seen = onnxamp.diff_models(ENCODER, low, provider="browser")
        assert seen.passed
        assert seen.lowest == "float16"
        assert seen.ran_on == engine_on("browser").name("float16")
        assert seen.noise is not None
        assert seen.noise < 1e-5
        emulated = onnxamp.diff_models(ENCODER, low, provider="cpu", target="webgpu")
        for one, other in zip(seen.outputs, emulated.outputs, strict=True):
            assert other.rel_l2 / 3 < one.rel_l2 < other.rel_l2 * 3

    def test_a_sum_that_overflows_is_seen(self) -> None:
        """A mean of 4,096 numbers around 40, which WebGPU sums up in float16; no layers are compared in a browser."""
        model = parse("""(float[1, 1, 64, 64] x) => (float[1, 1, 1, 1] y)
            <float one = {40}> { big = Add (x, one) y = GlobalAveragePool (big) }""")
        feeds = {"x": np.zeros((1, 1, 64, 64), np.float32)}
        low = onnxamp.convert_model(model, level="O3")
        assert onnxamp.diff_models(model, low, feeds, provider="cpu").passed
        seen = onnxamp.diff_models(model, low, feeds, provider="browser")
        assert not seen.passed
        assert seen.layers == ()

    def test_times(self, tmp_path: Path) -> None:
        low = tmp_path / "low.onnx"
        onnx.save(onnxamp.convert_model(ENCODER), low)
        result = run_cli("bench", ENCODER, low, "--provider", "browser", "--seconds", "0.05", "--dim", "sequence=4")
        assert result.exit_code == 0, result.output
        text = " ".join(result.output.split())
        assert open_browser().name in text
        assert f"onnxruntime-web {open_browser().web}" in text
        assert "WEBGPU" in text
        assert "Times in a browser include reading outputs back" in text

    def test_beside_another_provider(self) -> None:
        quick = BenchOptions(seconds=0.05, profile=False)
        each = [BenchOptions(seconds=0.05, profile=False, provider="cpu"), quick]
        found = onnxamp.bench_models(ENCODER, ENCODER, provider="browser", options=each)
        assert found.ran_on == f"CPU; {open_browser().name}"
        assert found.runtime.startswith("onnxruntime 1.")
        assert all(timing.latency.median > 0 for timing in found.timings)


def child(code: str, **changed: str) -> "subprocess.Popen[str]":
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths} | changed, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.browser
def test_an_adapter_without_float16_is_refused_for_float16_alone(tmp_path: Path) -> None:
    onnx.save(parse("(float[2] x) => (float[2] y) { y = Neg (x) }"), tmp_path / "a.onnx")
    onnx.save(parse("(float16[2] x) => (float16[2] y) { y = Neg (x) }"), tmp_path / "b.onnx")
    code = f"""
import json
from onnxamp import RuntimeFailure
from onnxamp._runtime.browser import open_browser
browser = open_browser()
facts = [browser.name, browser.has_float16, str(browser.open({str(tmp_path / "a.onnx")!r}).assigned)]
try:
    open_browser().open({str(tmp_path / "b.onnx")!r})
except RuntimeFailure as error:
    facts.append(str(error))
print(json.dumps(facts))
"""
    own = os.environ[CHROMIUM].split()[-1]
    out, err = child(code, **{CHROMIUM: f"{own} --use-webgpu-adapter=swiftshader"}).communicate(timeout=120)
    name, has_float16, assigned, refusal = json.loads(out or err)
    assert "SwiftShader" in name
    assert ", software, in Chromium" in name
    assert not has_float16
    assert "WebGpu" in assigned
    assert (
        "does not compute float16 (it lacks WebGPU's shader-f16); use a GPU that does, or --provider webgpu" in refusal
    )


@pytest.mark.browser
@pytest.mark.skipif(os.name != "posix", reason="Chromium is told by a pipe on POSIX alone")
def test_chromium_ends_with_its_process_however_that_ends() -> None:
    code = """
from onnxamp._runtime.browser import open_browser
print(open_browser()._chromium._process.pid, flush=True)
input()
"""
    with TemporaryDirectory(prefix="o", ignore_cleanup_errors=True) as folder:  # short, as names of sockets must be
        process = child(code, TMPDIR=folder)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        group = int(line)
        os.killpg(group, 0)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        pytest.fail("Chromium runs on")
