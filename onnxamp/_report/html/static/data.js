/* The embedded data, as columns, and how numbers are written. Texts from the model are only ever set as textContent. */

const raw = JSON.parse(document.getElementById("data").textContent);

const WORDS = { inf: Infinity, "-inf": -Infinity, nan: NaN };
/** A number of the data: null where there is none. */
const decode = (x) => (typeof x === "string" ? WORDS[x] : x);
/** Rows of a column whose texts are stored once each. */
const texts = (table) => table.rows.map((row) => table.texts[row]);

/** What is said of a node of a quantized network, by its role. */
const ROLES = {
  scales: (type) => `${type} Q/DQ, in the precision of its scale`,
  products: (type) => `product of dequantized ${type}`,
  integers: (type) => `kernel with ${type} inside`,
};
/** The type of such a node, what is said of it, and how it is drawn; null for other nodes. */
const readQuantized = (told) => {
  const [, type, role] = told.match(/^(.*) (\w+)$/) || [];
  return role ? { type, text: ROLES[role](type), kind: role === "scales" ? "scales" : "quantized" } : null;
};

const count = raw.nodes.name.length;
const nodes = {
  name: raw.nodes.name,
  op: texts(raw.nodes.op),
  scope: texts(raw.nodes.scope),
  precision: texts(raw.nodes.precision),
  provider: texts(raw.nodes.provider),
  quantized: texts(raw.nodes.quantized).map(readQuantized),
  why: texts(raw.nodes.why),
  reason: texts(raw.nodes.reason),
  messages: (i) => raw.nodes.messages[i] || [],
  isCast: new Uint8Array(count),
  level: new Uint8Array(count),
  local: new Array(count).fill(null),
  accumulated: new Array(count).fill(null),
  largest: new Array(count).fill(null),
};
for (const i of raw.nodes.casts) nodes.isCast[i] = 1;
for (const [i, list] of Object.entries(raw.nodes.messages)) nodes.level[i] = Math.max(...list.map(([level]) => level));

const values = {
  count: raw.values.node.length,
  node: raw.values.node,
  name: raw.values.name,
  dtype: texts(raw.values.dtype),
  local: raw.values.local.map(decode),
  accumulated: raw.values.accumulated.map(decode),
  least: raw.values.least.map(decode),
  largest: raw.values.largest.map(decode),
  /** What the result stores is the value times this. */
  factor: new Float64Array(raw.values.node.length).fill(1),
  of: Array.from({ length: count }, () => []),
};

for (const [v, exponent] of Object.entries(raw.values.exponents)) values.factor[v] = 2 ** -exponent;
const isRescaled = values.factor.some((factor) => factor !== 1);

/** The worse of two errors: null is no error, NaN the worst. */
const worse = (a, b) => (a === null ? b : b === null ? a : Number.isNaN(a) || a > b ? a : b);
for (let v = 0; v < values.count; v++) {
  const i = values.node[v];
  values.of[i].push(v);
  for (const key of ["local", "accumulated", "largest"]) nodes[key][i] = worse(nodes[key][i], values[key][v]);
}

const limits = raw.window && raw.window.limits.map(decode);
const low = raw.window
  ? { name: raw.window.name, largest: limits[0], normal: limits[1], subnormal: limits[2], rounding: limits[3] }
  : null;
const isLow = (precision) => precision === "float16" || precision === "bfloat16";
const lowName = low ? low.name : nodes.precision.find(isLow) || "low precision";

/** A number for people: 0.00123, 1.23e-5, 65,504, ∞, NaN. */
const number = (x, digits = 3) => {
  if (x === null || x === undefined) return "";
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(digits - 1).replace("e+", "e");
  return size >= 1000 ? Math.round(x).toLocaleString("en-US") : String(Number(x.toPrecision(digits)));
};
const whole = (n) => n.toLocaleString("en-US");

const SUPER = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (base, exponent) => base + [...String(exponent)].map((c) => SUPER[c]).join("");

/** An element with attributes and children; strings become text, never markup. */
const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const fill = (node, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
/** Characters of a name in a table: two lines on a phone. */
const LONGEST = 72;
/** A name without its middle if it is long: its ends tell names apart. */
const shortened = (name) => {
  const letters = [...name];
  const half = LONGEST / 2;
  return letters.length > LONGEST ? [...letters.slice(0, half - 1), "…", ...letters.slice(-half)].join("") : name;
};
/** A name that may be broken after its separators, and whose last part stands out from the path to it. */
const breakable = (name) => {
  const cut = name.slice(0, -1).lastIndexOf("/") + 1;
  const pieces = (text) => text.split(/(?<=[/._:])/).flatMap((part) => [document.createElement("wbr"), part]);
  return element("bdi", {}, element("span", { class: "path" }, ...pieces(name.slice(0, cut))), ...pieces(name.slice(cut)));
};
const byId = (id) => document.getElementById(id);
