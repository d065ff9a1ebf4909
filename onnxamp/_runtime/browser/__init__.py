"""Running models in a browser: a headless Chromium with onnxruntime-web, which computes on WebGPU."""
