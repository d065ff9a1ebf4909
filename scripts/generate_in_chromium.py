"""Generate tokens with transformers.js in Chromium, on WebGPU; scripts/test_generation.py calls it.

.venv/bin/python scripts/generate_in_chromium.py HOME FOLDER DTYPE COUNT PROMPT

HOME holds FOLDER, with the model, and npm/node_modules. PROMPT is a JSON list of tokens. Where there is no GPU, Mesa's
software Vulkan computes, which has float16.
"""

import json
import os
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from web import software_vulkan

from onnxamp._ops.targets import read_table
from onnxamp._runtime.browser.session import find_chromium

PAGE = """<!doctype html>
<script type="module">
import * as hub from '/npm/node_modules/@huggingface/transformers/dist/transformers.min.js';
const { AutoModelForCausalLM, Tensor, env } = hub;
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = '/';
env.useBrowserCache = false;
env.backends.onnx.wasm.wasmPaths = '/npm/node_modules/onnxruntime-web/dist/';
window.generate = async ([folder, dtype, count, prompt]) => {
  const model = await AutoModelForCausalLM.from_pretrained(folder, { dtype, device: 'webgpu' });
  const ids = prompt.map(BigInt);
  const tensor = (values) => new Tensor('int64', BigInt64Array.from(values), [1, ids.length]);
  const output = await model.generate({
    inputs: tensor(ids), attention_mask: tensor(ids.map(() => 1n)), do_sample: false,
    max_new_tokens: count, min_new_tokens: count,
  });
  return output.tolist()[0].slice(ids.length).map(Number);
};
</script>
"""
FLAGS = ("--no-sandbox", *read_table("browser")["flags"], *read_table("browser")["systems"]["linux"]["flags"])


class Handler(SimpleHTTPRequestHandler):
    """Serves files, and the page at the root."""

    def do_GET(self) -> None:
        """Answer with the page or a file."""
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


def generate(home: Path, folder: str, dtype: str, count: int, prompt: list[int]) -> list[int]:
    """The tokens that follow a prompt."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(home)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=[*FLAGS], env={**os.environ, **software_vulkan()}
        )
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_function("Boolean(window.generate)")
        found: list[int] = page.evaluate("(given) => generate(given)", [folder, dtype, count, prompt])
        browser.close()
    server.shutdown()
    return found


if __name__ == "__main__":
    home, folder, dtype, count, prompt = sys.argv[1:]
    print(json.dumps(generate(Path(home), folder, dtype, int(count), json.loads(prompt))))
