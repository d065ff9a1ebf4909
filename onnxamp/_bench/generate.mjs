// Generates text with transformers.js, in Node and in a page, for onnxamp/_bench/text_engines.py.

let hub, model, wanted;

// Suffixes of files by their types: huggingface/transformers.js, src/utils/dtypes.js (DEFAULT_DTYPE_SUFFIX_MAPPING).
const suffixes = /^(.*)_(fp16|int8|uint8|quantized|q1|q2|q4|q1f16|q2f16|q4f16|bnb4)$/;

export async function load({ library, wasm, home, folder, file, device, threads }) {
  hub = await import(library);
  const { env } = hub;
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: home });
  Object.assign(env, { useBrowserCache: false, useFSCache: false, useWasmCache: false });
  if (wasm) env.backends.onnx.wasm.wasmPaths = wasm;
  const config = await hub.AutoConfig.from_pretrained(folder, { local_files_only: true });
  const kinds = [hub.AutoModelForCausalLM, hub.AutoModelForSeq2SeqLM, hub.AutoModelForSpeechSeq2Seq];
  const kind = kinds.find((one) => one.supports(config.model_type));
  if (!kind) throw new Error(`it has no text model of the type ${JSON.stringify(config.model_type)}`);
  const [, stem, suffix] = file.match(suffixes) ?? [null, file, "fp32"];
  const dtype = suffix === "quantized" ? "q8" : suffix;
  // The name of an encoder beside a decoder is not that of the file.
  const model_file_name = kind === hub.AutoModelForCausalLM ? stem : null;
  const session_options = threads ? { intraOpNumThreads: threads } : {};
  const options = { config, dtype, device, model_file_name, session_options, local_files_only: true };
  model = await kind.from_pretrained(folder, options);
  wanted = model.main_input_name;
  if (!["input_ids", "input_features"].includes(wanted)) throw new Error(`it reads ${wanted}, which cannot be made up`);
  return { version: env.version };
}

export async function generate({ tokens, count, watched }) {
  const ids = new hub.Tensor("int64", BigInt64Array.from(tokens, BigInt), [1, tokens.length]);
  const inputs = wanted === "input_features" ? { input_features: sound(), decoder_input_ids: ids }
    : { inputs: ids, attention_mask: hub.ones_like(ids) };
  const { Streamer, Watch } = classes();
  const streamer = new Streamer();
  const watch = new Watch();
  const processors = new hub.LogitsProcessorList();
  if (watched) processors.push(watch);
  const greedy = { do_sample: false, num_beams: 1, max_new_tokens: count, min_new_tokens: count };
  streamer.last = performance.now();
  await model.generate({ ...inputs, ...greedy, streamer, logits_processor: processors });
  const [first, ...steps] = streamer.taken;
  return { tokens: streamer.tokens, first, steps, nans: watch.nans };
}

// Sound that is the same for all models: noise from a generator of numbers with a fixed seed.
function sound() {
  const { num_mel_bins: bins, max_source_positions: positions } = model.config;
  let state = 12345;
  const noise = () => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return state / 1073741824 - 1;
  };
  const length = 2 * positions;
  return new hub.Tensor("float32", Float32Array.from({ length: bins * length }, noise), [1, bins, length]);
}

function classes() {
  class Streamer extends hub.BaseStreamer {
    tokens = [];
    taken = [];
    begun = false;
    put([ids]) {
      if (this.begun) { // the prompt comes first
        const now = performance.now();
        this.taken.push((now - this.last) / 1000);
        this.last = now;
        this.tokens.push(Number(ids.at(-1)));
      }
      this.begun = true;
    }
    end() {}
  }
  class Watch extends hub.LogitsProcessor {
    nans = 0;
    _call(ids, logits) {
      this.nans += logits.data.some(Number.isNaN) ? 1 : 0;
      return logits;
    }
  }
  return { Streamer, Watch };
}
