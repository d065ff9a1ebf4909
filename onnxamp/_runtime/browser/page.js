// Answers what onnxamp asks, one question after the other; browser/messages.py describes the form of both.

const sessions = new Map(); // by number: {session, feeds}
const adapters = 12; // times that an adapter is asked for: the first answers fail while Chromium's GPU process starts
let ort;
let logged = null; // where onnxruntime's messages are kept, while somebody wants them

for (const level of ["log", "info", "debug", "warn", "error"]) {
  console[level] = (...words) => logged?.push(words.join(" "));
}

function unpack(message) {
  const behind = 4 + new DataView(message).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(message, 4, behind - 4)));
  const feeds = {};
  for (const { name, type, shape, start, end, texts } of header.tensors) {
    feeds[name] = new ort.Tensor(type, texts ?? typed(type, message.slice(behind + start, behind + end)), shape);
  }
  return [header, feeds];
}

function typed(type, buffer) {
  const kinds = {
    float32: Float32Array, float64: Float64Array, bool: Uint8Array,
    float16: globalThis.Float16Array ?? Uint16Array,
    int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
    uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array,
  };
  return new kinds[type](buffer);
}

function pack(header, outputs = {}) {
  const tensors = [];
  const parts = [];
  let size = 0;
  for (const [name, { type, dims, data }] of Object.entries(outputs)) {
    if (type === "string") {
      tensors.push({ name, type, shape: dims, texts: data });
      continue;
    }
    tensors.push({ name, type, shape: dims, start: size, end: size + data.byteLength });
    parts.push(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    size += data.byteLength;
  }
  const text = new TextEncoder().encode(JSON.stringify({ ...header, tensors }));
  const length = new DataView(new ArrayBuffer(4));
  length.setUint32(0, text.byteLength, true);
  return new Blob([length.buffer, text, ...parts]);
}

const answers = {
  async start({ bundle }) {
    let adapter;
    for (let times = 0; times < adapters && !adapter; times++) {
      if (times > 0) await new Promise((done) => setTimeout(done, 250));
      adapter = await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" });
    }
    ort = await import(new URL(`ort/${bundle}`, location));
    ort.env.wasm.wasmPaths = new URL("ort/", location).href;
    const info = adapter?.info;
    return [{
      agent: navigator.userAgent,
      version: ort.env.versions?.web ?? "",
      adapter: info && { vendor: info.vendor, architecture: info.architecture, device: info.device,
        description: info.description, fallback: info.isFallbackAdapter ?? adapter.isFallbackAdapter ?? false },
      float16: adapter?.features.has("shader-f16") ?? false,
    }];
  },

  async load({ number, model, data }) {
    logged = [];
    const session = await ort.InferenceSession.create(model, {
      executionProviders: ["webgpu"],
      externalData: data.map(({ path, url }) => ({ path, data: url })),
      logSeverityLevel: 0, // it tells where nodes run
    });
    const placed = logged.filter((line) => line.includes("VerifyEachNodeIsAssignedToAnEp"));
    logged = null;
    sessions.set(number, { session, feeds: {} });
    const inputs = session.inputMetadata.map(({ name, type, isTensor }) => [name, isTensor ? type : "other"]);
    return [{ inputs, placed }];
  },

  async feed({ number }, feeds) {
    sessions.get(number).feeds = feeds;
    return [{}];
  },

  async run({ number }) {
    return [{}, await once(number)];
  },

  async time({ number, count }) {
    const taken = [];
    for (let run = 0; run < count; run++) {
      const start = performance.now();
      await once(number);
      taken.push((performance.now() - start) / 1000);
    }
    return [{ taken }];
  },

  async call({ module, name, given }) {
    return [await (await import(new URL(module, location)))[name](given)];
  },

  async release({ number }) {
    await sessions.get(number)?.session.release();
    sessions.delete(number);
    return [{}];
  },
};

function once(number) {
  const { session, feeds } = sessions.get(number);
  return session.run(feeds, { logSeverityLevel: 4 });
}

async function answered(message) {
  try {
    const [question, feeds] = unpack(message);
    return pack(...(await answers[question.ask](question, feeds)));
  } catch (error) {
    return pack({ error: String(error?.message ?? error) });
  } finally {
    logged = null;
  }
}

fetch("alive").catch(() => {}); // held open: tells that the page is gone
for (;;) {
  const response = await fetch("next");
  if (response.status === 200) {
    await fetch("answer", { method: "POST", body: await answered(await response.arrayBuffer()) });
  }
}
