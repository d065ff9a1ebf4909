// Generates text greedily with transformers.js in Node, for scripts/test_generation.py:
//
//   node tests/transformers_js.mjs '{"library": URL, "home": DIR, "folder": NAME, "file": STEM, "tokens": [...], "count": N}'
//
// Prints {"tokens": the N tokens, "nans": how many of them were chosen from logits with NaN} as JSON.

const asked = JSON.parse(process.argv[2]);

// What libraries print is no answer.
for (const level of ["log", "info", "debug", "warn"]) console[level] = console.error;

const hub = await import(asked.library);
Object.assign(hub.env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: asked.home });

// Suffixes of files by their types: huggingface/transformers.js, src/utils/dtypes.js (DEFAULT_DTYPE_SUFFIX_MAPPING).
const [, stem, dtype] = asked.file.match(/^(.*)_(fp16|q4|q4f16)$/) ?? [null, asked.file, "fp32"];
const options = { dtype, device: "cpu", model_file_name: stem, local_files_only: true };
const model = await hub.AutoModelForCausalLM.from_pretrained(asked.folder, options);

class Watch extends hub.LogitsProcessor {
  nans = 0;
  _call(ids, logits) {
    this.nans += logits.data.some(Number.isNaN) ? 1 : 0;
    return logits;
  }
}

const watch = new Watch();
const processors = new hub.LogitsProcessorList();
processors.push(watch);
const inputs = new hub.Tensor("int64", BigInt64Array.from(asked.tokens, BigInt), [1, asked.tokens.length]);
const generated = await model.generate({
  inputs,
  attention_mask: hub.ones_like(inputs),
  do_sample: false,
  max_new_tokens: asked.count,
  min_new_tokens: asked.count,
  logits_processor: processors,
});
const tokens = generated.tolist()[0].slice(asked.tokens.length).map(Number);
process.stdout.write(JSON.stringify({ tokens, nans: watch.nans }) + "\n");
