/* The tracks of the figure. Each gives its height and its parts, for the columns in sight; null where it has no data. */

const has = (column) => column.some((x) => x !== null);
const HAS_ERRORS = has(values.local) || has(values.accumulated);
const HAS_QUANTIZED = nodes.quantized.some(Boolean);
const HAS_RANGES = values.largest.some((x) => x > 0);

/** A rectangle as a piece of a path: thousands of them are one element. */
const box = (x, y, w, h) => `M${x.toFixed(2)} ${y.toFixed(2)}h${w.toFixed(2)}v${h.toFixed(2)}h${(-w).toFixed(2)}z`;
const label = (c, y, text) => svg("text", { x: c.left - 8, y, "text-anchor": "end" }, text);

/** Pixels between labels of an axis, one below the other. */
const APART = 13;
/** Labels of an axis: named lines, which make room for each other downwards, and ticks where these leave room. */
const axisLabels = (c, named, ticks) => {
  const placed = [];
  for (const [at, text] of named.toSorted((a, b) => a[0] - b[0])) {
    placed.push([Math.max(at, placed.length ? placed[placed.length - 1][0] + APART : at), text]);
  }
  const free = ticks.filter(([at]) => placed.every(([other]) => Math.abs(at - other) >= APART));
  return [...placed, ...free].map(([at, text]) => label(c, at + 4, text));
};

/** Precision: float32 above the middle line, low below it; Casts, what computes with integers, and problems in rows of their own. */
const precisionTrack = (c) => {
  const lane = c.total < 80 ? 34 : 40;
  const middle = 22 + lane;
  const gap = c.step >= 5 ? 1 : 0;
  const paths = { high: "", low: "", mixed: "", none: "", cast: "", scales: "", quantized: "", warn: "", bad: "" };
  const casts = new Int32Array(c.total);
  const parts = [];
  let most = 1;
  let hasProblems = false;
  for (let k = 0; k < c.total; k++) {
    for (let i = c.first[k]; i < c.first[k + 1]; i++) casts[k] += nodes.isCast[i];
    most = Math.max(most, casts[k]);
  }
  const castTop = middle + lane + 8;
  const gridTop = castTop + (raw.nodes.casts.length ? 22 : 0);
  const problemTop = gridTop + (HAS_QUANTIZED ? 22 : 0);
  for (let k = 0; k < c.total; k++) {
    const [x, w] = [c.x(k), c.step - gap];
    const seen = { high: 0, low: 0, mixed: 0 };
    const computing = c.first[k + 1] - c.first[k] - casts[k];
    let level = 0;
    let grid = 0;
    for (let i = c.first[k]; i < c.first[k + 1]; i++) {
      level = Math.max(level, nodes.level[i]);
      if (nodes.quantized[i]) grid = Math.max(grid, nodes.quantized[i].kind === "scales" ? 1 : 2);
      if (nodes.isCast[i]) continue;
      if (isLow(nodes.precision[i])) seen.low++;
      else if (nodes.precision[i] === "float32" || nodes.precision[i] === "float64") seen.high++;
      else if (nodes.precision[i] === "mixed") seen.mixed++;
    }
    const size = Math.max(1, computing) / lane;
    const [up, down, both] = [seen.high / size, seen.low / size, seen.mixed / size / 2];
    if (up) paths.high += box(x, middle - both - up, w, up);
    if (down) paths.low += box(x, middle + both, w, down);
    if (both) paths.mixed += box(x, middle - both, w, 2 * both);
    if (!up && !down && !both && !casts[k]) paths.none += box(x, middle - 1.5, w, 3);
    if (casts[k]) {
      const h = 4 + (12 * casts[k]) / most;
      const thick = Math.max(1.5, Math.min(4, w));
      paths.cast += box(x + (w - thick) / 2, castTop + 16 - h, thick, h);
    }
    if (grid) paths[grid > 1 ? "quantized" : "scales"] += grid > 1 ? box(x, gridTop + 2, w, 14) : box(x, gridTop + 7, w, 4);
    if (level > 1) {
      hasProblems = true;
      paths[level > 2 ? "bad" : "warn"] += box(c.middle(k) - 1.5, problemTop + 3, 3, 9);
    }
    if (c.first[k + 1] - c.first[k] === 1 && !nodes.isCast[c.first[k]]) inside(parts, c, k, seen, middle, lane);
  }
  const marks = Object.entries(paths).filter(([, d]) => d).map(([kind, d]) => svg("path", { class: `fill ${kind}`, d }));
  const names = [svg("text", { class: "title", x: c.left, y: 11 }, "Precision"), label(c, middle - lane / 2 + 4, "float32")];
  names.push(label(c, middle + lane / 2 + 4, isLow(lowName) ? lowName : "low"));
  if (paths.cast) names.push(label(c, castTop + 13, "Casts"));
  if (HAS_QUANTIZED) names.push(label(c, gridTop + 13, "integer"));
  if (hasProblems) names.push(label(c, problemTop + 12, "problems"));
  const line = svg("line", { class: "grid", x1: c.left, x2: c.left + c.plot, y1: middle, y2: middle });
  return { height: problemTop + (hasProblems ? 36 : 16), parts: [line, ...marks, ...parts, ...names] };
};

/** The op's name in a cell that is wide enough for it. */
const inside = (parts, c, k, seen, middle, lane) => {
  const i = c.first[k];
  if (nodes.op[i].length * 6.3 + 6 > c.step || !(seen.high || seen.low || seen.mixed)) return;
  const y = middle + 4 + (seen.high ? -lane / 2 : seen.low ? lane / 2 : 0);
  parts.push(svg("text", { class: `inside ${nodes.precision[i]}`, x: c.middle(k), y, "text-anchor": "middle" }, nodes.op[i]));
};

/** Relative L2 errors on a logarithmic scale, with shelves for 0 and for infinity. */
const errorTrack = (c) => {
  if (!HAS_ERRORS) return null;
  const [top, height] = [26, 178];
  const found = [...nodes.local, ...nodes.accumulated].filter((x) => x !== null);
  const finite = found.filter((x) => x > 0 && Number.isFinite(x)).map(Math.log10);
  if (low) finite.push(Math.log10(low.rounding));
  if (raw.limit > 0) finite.push(Math.log10(raw.limit));
  const ceiling = Math.ceil(extreme(finite, Math.max, 0) + 0.2);
  const floor = Math.min(ceiling - 2, Math.max(ceiling - DECADES, Math.floor(extreme(finite, Math.min, -6) - 0.2)));
  const shelfTop = found.some((x) => !Number.isFinite(x)) ? 20 : 0;
  const shelfLow = found.some((x) => x < 10 ** floor) ? 18 : 0;
  const scale = (height - shelfTop - shelfLow) / (ceiling - floor);
  const y = (x) => {
    if (!Number.isFinite(x)) return top + 4;
    if (x < 10 ** floor) return top + height - 3;
    return top + shelfTop + (ceiling - Math.log10(x)) * scale;
  };
  const parts = [svg("text", { class: "title", x: c.left, y: 11 }, "Relative L2 error")];
  const every = Math.ceil((ceiling - floor) / 6);
  const ticks = [];
  for (let e = ceiling; e >= floor; e -= every) {
    const at = y(10 ** e);
    parts.push(svg("line", { class: "grid", x1: c.left, x2: c.left + c.plot, y1: at, y2: at }));
    ticks.push([at, power("10", e)]);
  }
  if (shelfTop) parts.push(label(c, top + 8, "∞, NaN"));
  if (shelfLow) parts.push(label(c, top + height + 1, found.some((x) => x > 0 && x < 10 ** floor) ? "less" : "0"));
  parts.push(...rules(c, y, ticks), ...errorMarks(c, y, 10 ** floor), ...flag(c, top, height));
  return { height: top + height + 28, parts };
};

/** Decades that the error scale spans at most: errors far below one rounding do not matter. */
const DECADES = 9;

const extreme = (list, pick, otherwise) => (list.length ? list.reduce((a, b) => pick(a, b)) : otherwise);

/** One rounding, and the limit, as lines with their names at the right, or among the ticks if there is no room. */
const rules = (c, y, ticks) => {
  const end = c.left + c.plot;
  const isWide = c.right > 60;
  const lines = [];
  if (raw.limit > 0) lines.push([y(raw.limit), `limit ${number(raw.limit, 2)}`]);
  if (low) lines.push([y(low.rounding), `${isWide ? "one" : "1"} rounding ${number(low.rounding, 2)}`]);
  const parts = lines.map(([at]) => svg("line", { class: "rule", x1: c.left, x2: end, y1: at, y2: at }));
  if (isWide) parts.push(...lines.map(([at, text]) => svg("text", { x: end + 6, y: at + 4 }, text)));
  return [...parts, ...axisLabels(c, isWide ? [] : lines, ticks)];
};

const errorMarks = (c, y, floor) => {
  const accumulated = { line: "", points: "", spread: [], low: [] };
  let local = "";
  let broken = "";
  let isBroken = true;
  const radius = c.step >= 6 ? 2.6 : 1.7;
  for (let k = 0; k < c.total; k++) {
    let [most, least, own] = [null, null, null];
    for (let i = c.first[k]; i < c.first[k + 1]; i++) {
      own = worse(own, nodes.local[i]);
      const x = nodes.accumulated[i];
      most = worse(most, x);
      if (x !== null && Number.isFinite(x)) least = least === null ? x : Math.min(least, x);
    }
    const at = c.middle(k);
    if (own !== null) {
      if (Number.isFinite(own)) local += dot(at, y(own), radius);
      else broken += dot(at, y(own), 2.6);
    }
    if (most === null) continue;
    if (most < floor) isBroken = true;
    accumulated.line += `${isBroken ? "M" : "L"}${at.toFixed(2)} ${y(most).toFixed(2)}${isBroken ? "h0" : ""}`;
    isBroken = most < floor;
    if (c.crowded && least !== null) {
      accumulated.spread.push(`${at.toFixed(2)} ${y(most).toFixed(2)}`);
      accumulated.low.push(`${at.toFixed(2)} ${y(least).toFixed(2)}`);
    }
    if (!Number.isFinite(most)) broken += dot(at, y(most), 2.6);
    else if (c.step >= 6 || most < floor) accumulated.points += dot(at, y(most), 2.1);
  }
  const spread = accumulated.spread.length > 1 ? `M${[...accumulated.spread, ...accumulated.low.reverse()].join("L")}z` : "";
  return [
    svg("path", { class: "spread", d: spread }),
    svg("path", { class: "fill local", d: local }),
    svg("path", { class: "line", d: accumulated.line }),
    svg("path", { class: "point", d: accumulated.points }),
    svg("path", { class: "fill bad", d: broken }),
  ];
};

const dot = (x, y, r) => `M${(x - r).toFixed(2)} ${y.toFixed(2)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;

/** The first bad value: a red line with its name. */
const flag = (c, top, height) => {
  if (raw.firstBad === null || raw.firstBad < sight.from || raw.firstBad >= sight.to) return [];
  const x = c.middle(c.find(raw.firstBad));
  const isLeft = x < c.left + c.plot / 2;
  const room = Math.floor((isLeft ? c.left + c.plot - x : x - c.left - 100) / 6.4);
  const text = `first bad: ${raw.firstBadText}`;
  const told = text.length <= room ? text : room > 14 ? `${text.slice(0, room - 1)}…` : "first bad";
  return [
    svg("line", { class: "flagline", x1: x, x2: x, y1: top - 8, y2: top + height }),
    svg("text", { class: "flag", x: isLeft ? x + 6 : x - 6, y: top - 3, "text-anchor": isLeft ? "start" : "end" }, told),
  ];
};

/** Smallest to largest magnitude of each value, in powers of two, against the range of the low-precision type. */
const rangeTrack = (c) => {
  if (!HAS_RANGES) return null;
  const [top, height] = [26, 190];
  const logs = (column) => column.filter((x) => x > 0 && Number.isFinite(x)).map(Math.log2);
  const tops = logs([...values.largest, ...values.largest.map(asStored)]);
  const bottoms = logs(values.least.map(asStored));
  const edges = low ? [Math.floor(Math.log2(low.subnormal)) - 3, Math.ceil(Math.log2(low.largest)) + 3] : [];
  const beyond = isRescaled ? 3 * BEYOND : BEYOND;
  const bounds = low ? [edges[0] - beyond, edges[1] + beyond] : [-Infinity, Infinity];
  const floor = Math.max(bounds[0], Math.floor(extreme([...bottoms, ...edges], Math.min, -24) - 0.5));
  const ceiling = Math.min(bounds[1], Math.ceil(extreme([...tops, ...edges], Math.max, 16) + 0.5));
  const scale = height / (ceiling - floor);
  const y = (power2) => top + (ceiling - Math.min(ceiling, Math.max(floor, power2))) * scale;
  const span = isRescaled && c.plot < 560 ? "" : ", smallest to largest |x|";
  const title = `Range of values${span}${isRescaled ? ", before and after rescaling" : ""}`;
  const parts = [svg("text", { class: "title", x: c.left, y: 11 }, title)];
  parts.push(...backdrop(c, y, floor, ceiling));
  parts.push(...rangeMarks(c, y), ...marksBefore(c, y));
  if (c.right > 60) parts.push(...histogram(c, y, floor, ceiling, scale));
  return { height: top + height + 14, parts };
};

/** What the result stores of a magnitude. */
const asStored = (x, v) => (x === null ? null : x * values.factor[v]);

/** From where to where rescaling moves the largest magnitude of each value: a dot before, and a line to what is stored. */
const marksBefore = (c, y) => {
  if (!isRescaled) return [];
  let [lines, dots] = ["", ""];
  for (let k = 0; k < c.total; k++) {
    let [most, stored] = [0, 0];
    for (let i = c.first[k]; i < c.first[k + 1]; i++) {
      for (const v of values.of[i]) {
        if (values.factor[v] === 1 || !(values.largest[v] > most) || !Number.isFinite(values.largest[v])) continue;
        [most, stored] = [values.largest[v], asStored(values.largest[v], v)];
      }
    }
    if (!most) continue;
    const x = c.middle(k);
    lines += `M${x.toFixed(2)} ${y(Math.log2(stored)).toFixed(2)}V${y(Math.log2(most)).toFixed(2)}`;
    dots += dot(x, y(Math.log2(most)), c.step >= 6 ? 2.8 : 2);
  }
  return [svg("path", { class: "moved", d: lines }), svg("path", { class: "fill before", d: dots })];
};

/** Binades beyond the window that the range scale spans at most, thrice where values came from there: what lies farther out stands at its edge. */
const BEYOND = 10;

/** The window of the low-precision type, with the names of its edges among the ticks of the axis. */
const backdrop = (c, y, floor, ceiling) => {
  const parts = [];
  const named = [];
  if (low) {
    const [most, normal, least] = [low.largest, low.normal, low.subnormal].map(Math.log2);
    const area = (kind, a, b) => svg("rect", { class: `fill ${kind}`, x: c.left, width: c.plot, y: y(a), height: y(b) - y(a) });
    parts.push(area("window", most, normal), area("edge", normal, least));
    const two = (exponent) => power("2", Math.round(exponent));
    named.push([y(most), `largest ${number(low.largest)}`], [y(normal), `normal ${two(normal)}`], [y(least), `subnormal ${two(least)}`]);
    for (const [at] of named) parts.push(svg("line", { class: "rule", x1: c.left, x2: c.left + c.plot, y1: at, y2: at }));
  }
  const every = [8, 16, 32, 64].find((step) => (ceiling - floor) / step <= 8) || 128;
  const ticks = [];
  for (let e = Math.ceil(floor / every) * every; e <= ceiling; e += every) {
    parts.push(svg("line", { class: "grid", x1: c.left - 4, x2: c.left, y1: y(e), y2: y(e) }));
    ticks.push([y(e), power("2", e)]);
  }
  return [...parts, ...axisLabels(c, named, ticks)];
};

/** Low values are blue; what leaves the window is red above it and amber below. float32 values, grey, may leave it. */
const rangeMarks = (c, y) => {
  const paths = { "high pale": "", high: "", "low pale": "", low: "", warn: "", bad: "" };
  const [floor, ceiling] = low ? [Math.log2(low.subnormal), Math.log2(low.largest)] : [-Infinity, Infinity];
  const thick = Math.min(8, c.step - (c.step >= 4 ? 1 : 0));
  for (let k = 0; k < c.total; k++) {
    const x = c.middle(k) - thick / 2;
    const piece = (kind, a, b) => { if (b >= a) paths[kind] += box(x, y(b), thick, Math.max(1, y(a) - y(b))); };
    const spans = spansOf(c.first[k], c.first[k + 1]);
    if (c.crowded) piece("high pale", spans.high.least, spans.high.most);
    piece("high", ...usual(spans.high, c.crowded));
    if (c.crowded) piece("low pale", Math.max(floor, spans.low.least), Math.min(ceiling, spans.low.most));
    const [a, b] = usual(spans.low, c.crowded);
    piece("low", Math.max(a, floor), Math.min(b, ceiling));
    if (spans.low.least < floor) piece("warn", spans.low.least, Math.min(spans.low.most, floor));
    if (spans.low.most > ceiling) piece("bad", Math.max(spans.low.least, ceiling), spans.low.most);
  }
  return Object.entries(paths).map(([kind, d]) => svg("path", { class: `fill ${kind}`, d }));
};

/** Binary logarithms of the extremes, and their sums, over the values of some nodes: low ones and others apart. */
const spansOf = (from, to) => {
  const span = () => ({ least: Infinity, most: -Infinity, bottoms: 0, tops: 0, count: 0 });
  const spans = { low: span(), high: span() };
  for (let i = from; i < to; i++) {
    for (const v of values.of[i]) {
      if (!(values.largest[v] > 0)) continue;
      const one = spans[isLow(values.dtype[v]) ? "low" : "high"];
      const top = Math.log2(asStored(values.largest[v], v));
      const bottom = values.least[v] > 0 && Number.isFinite(values.least[v]) ? Math.log2(asStored(values.least[v], v)) : top;
      one.least = Math.min(one.least, bottom);
      one.most = Math.max(one.most, top);
      one.bottoms += bottom;
      one.tops += top;
      one.count++;
    }
  }
  return spans;
};

/** The range of one value; of many, the mean one. */
const usual = (span, crowded) => (crowded && span.count ? [span.bottoms / span.count, span.tops / span.count] : [span.least, span.most]);

/** How many values in sight have their largest (bars) and their smallest magnitude (outline) at each power of two. */
const histogram = (c, y, floor, ceiling, scale) => {
  const width = Math.ceil(2.5 / scale);
  const bins = Math.ceil((ceiling - floor) / width);
  const [most, least] = [new Int32Array(bins), new Int32Array(bins)];
  for (let i = sight.from; i < sight.to; i++) {
    for (const v of values.of[i]) {
      if (!(values.largest[v] > 0) || !Number.isFinite(values.largest[v])) continue;
      const bin = (x) => Math.max(0, Math.min(bins - 1, Math.floor((Math.log2(x) - floor) / width)));
      most[bin(asStored(values.largest[v], v))]++;
      if (values.least[v] > 0) least[bin(asStored(values.least[v], v))]++;
    }
  }
  const top = Math.max(1, ...most, ...least);
  const [x, room] = [c.left + c.plot + 10, c.right - 18];
  let bars = "";
  let outline = `M${x} ${y(floor).toFixed(2)}`;
  for (let b = 0; b < bins; b++) {
    const [a, z] = [floor + b * width, floor + (b + 1) * width];
    if (most[b]) bars += box(x, y(z) + 0.5, (room * most[b]) / top, Math.max(0.6, y(a) - y(z) - 0.5));
    const reach = (x + (room * least[b]) / top).toFixed(2);
    outline += `L${reach} ${y(a).toFixed(2)}L${reach} ${y(z).toFixed(2)}`;
  }
  return [
    svg("path", { class: "fill counts", d: bars }),
    svg("path", { class: "outline", d: outline }),
    svg("rect", { class: "fill counts", x, y: 3, width: 8, height: 8 }),
    svg("text", { x: x + 12, y: 11 }, "largest"),
    svg("rect", { class: "outline", x: x + 56.5, y: 3.5, width: 7, height: 7 }),
    svg("text", { x: x + 68, y: 11 }, "smallest"),
  ];
};

/** What the colors mean; only those that occur. */
const legend = (c) => {
  const items = [];
  const item = (kind, text) => items.push(element("li", {}, element("span", { class: `swatch ${kind}` }), text));
  const ranged = values.dtype.filter((_, v) => values.largest[v] > 0);
  const seen = new Set([...nodes.precision.filter((_, i) => !nodes.isCast[i]), ...ranged]);
  for (const precision of ["float16", "bfloat16"]) if (seen.has(precision)) item(precision, precision);
  const high = ["float32", "float64"].filter((precision) => seen.has(precision));
  if (high.length) item("high", high.join(" or "));
  if (seen.has("mixed")) item("mixed", "mixed");
  if (seen.has("no floats")) item("none", "no floats");
  if (raw.nodes.casts.length) item("tick cast", "Cast between floats");
  const kinds = new Map(nodes.quantized.filter(Boolean).map(({ text, kind }) => [text, kind]));
  for (const [text, kind] of kinds) item(kind, text);
  if (has(values.accumulated)) item("line accumulated", "accumulated error");
  if (has(values.local)) item("round local", "local error of one op");
  if (nodes.level.some((level) => level > 2)) item("tick bad", "problem: error");
  if (nodes.level.some((level) => level === 2)) item("tick warn", "problem: warning");
  if (isRescaled) item("round before", "largest |x| before rescaling");
  const leaves = (test) => low && values.dtype.some((dtype, v) => isLow(dtype) && test((column) => asStored(values[column][v], v)));
  if (leaves((stored) => stored("largest") > low.largest)) item("bad", `beyond ${low.name}: overflows`);
  if (leaves((stored) => stored("least") > 0 && stored("least") < low.subnormal)) item("warn", `below ${low.name}: becomes zero`);
  if (low && HAS_RANGES) item("dashed", `limits of ${low.name}`);
  if (c.crowded) item("pale low", "extremes of neighboring nodes");
  byId("legend").replaceChildren(...items);
};
