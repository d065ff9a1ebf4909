// Answers questions of onnxamp/_bench/text_engines.py in Node: lines of JSON.

import { createInterface } from "node:readline";
import * as generator from "./generate.mjs";

// What libraries print is no answer.
for (const level of ["log", "info", "debug", "warn"]) console[level] = console.error;

const place = `Node ${process.versions.node}`;
const lines = createInterface({ input: process.stdin });
lines.on("close", () => process.exit());
for await (const line of lines) {
  const { name, given } = JSON.parse(line);
  let answer;
  try {
    answer = await generator[name](given);
  } catch (error) {
    answer = { error: String(error?.message ?? error) };
  }
  const memory = 1024 * process.resourceUsage().maxRSS;
  process.stdout.write(JSON.stringify({ ...answer, place, memory }) + "\n");
}
