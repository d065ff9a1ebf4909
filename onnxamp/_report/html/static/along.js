/* The figure along the model: which nodes are in sight, pointing, zooming, and the tracks one below the other. */

const figure = byId("figure");
const sight = { from: 0, to: count };
let columns = null;
let cursor = null;
let goTo = () => {};

/** Nodes in sight, at most one column of them per pixel; what the tracks draw is summed up per column. */
const makeColumns = (width) => {
  // The left margin holds the names of limits, so that none stands over what is drawn; the right one, the histogram.
  const left = 104;
  const right = width < 560 ? 12 : 130;
  const span = sight.to - sight.from;
  const plot = Math.max(60, width - left - right);
  const total = Math.min(span, Math.floor(plot));
  const first = new Int32Array(total + 1);
  for (let k = 0; k <= total; k++) first[k] = sight.from + Math.floor((k * span) / total);
  const step = plot / total;
  const find = (i) => {
    let k = Math.min(total - 1, Math.max(0, Math.floor(((i - sight.from) * total) / span)));
    while (k + 1 < total && first[k + 1] <= i) k++;
    while (k > 0 && first[k] > i) k--;
    return k;
  };
  const crowded = total < span;
  return { left, right, width, plot, total, first, step, crowded, find, x: (k) => left + k * step, middle: (k) => left + (k + 0.5) * step };
};

/** The node that stands for a column: the one with a problem, else a Cast, else the one with the largest error. */
const face = (k) => {
  let best = columns.first[k];
  const rank = (i) => [nodes.level[i] > 1 ? nodes.level[i] : 0, i === raw.firstBad ? 1 : 0, nodes.isCast[i]];
  let top = rank(best);
  for (let i = best + 1; i < columns.first[k + 1]; i++) {
    const next = rank(i);
    const at = next.findIndex((r, n) => r !== top[n]);
    const ahead = at >= 0 ? next[at] > top[at] : worse(nodes.accumulated[best], nodes.accumulated[i]) !== nodes.accumulated[best];
    if (ahead) [best, top] = [i, next];
  }
  return best;
};

const draw = () => {
  const width = figure.clientWidth;
  if (!width || !count) return;
  columns = makeColumns(width);
  legend(columns);
  const tracks = [precisionTrack, errorTrack, rangeTrack].map((make) => make(columns)).filter(Boolean);
  const all = svg("svg", { role: "img", "aria-hidden": "true" });
  let y = 4;
  for (const track of tracks) {
    const group = svg("g", { transform: `translate(0 ${y})` }, ...track.parts);
    all.append(group);
    y += track.height;
  }
  all.append(...axis(columns, y));
  const height = y + 24;
  all.setAttribute("viewBox", `0 0 ${width} ${height}`);
  all.setAttribute("height", height);
  all.append(
    svg("rect", { class: "selection", id: "selection", y: 0, height: y, width: 0, visibility: "hidden" }),
    svg("line", { class: "cursor", id: "cursor", y1: 0, y2: y, visibility: "hidden" })
  );
  figure.replaceChildren(all);
  const part = sight.to - sight.from < count;
  byId("span").textContent = part ? `nodes ${whole(sight.from)} to ${whole(sight.to - 1)} of ${whole(count)}` : "";
  byId("zoom-out").disabled = byId("zoom-all").disabled = !part;
  byId("zoom-in").disabled = sight.to - sight.from <= 4;
  placeCursor();
};

/** Node numbers below the tracks. */
const axis = (c, y) => {
  const span = sight.to - sight.from;
  const wanted = Math.max(2, Math.floor(c.plot / 110));
  const scale = 10 ** Math.floor(Math.log10(Math.max(1, span / wanted)));
  const step = [1, 2, 5, 10].map((m) => m * scale).find((s) => span / s <= wanted) || 10 * scale;
  const parts = [svg("line", { class: "grid", x1: c.left, x2: c.left + c.plot, y1: y + 0.5, y2: y + 0.5 })];
  for (let i = Math.ceil(sight.from / step) * step; i < sight.to; i += step) {
    const x = c.left + ((i - sight.from + (span <= c.plot ? 0.5 : 0)) * c.plot) / span;
    parts.push(svg("line", { class: "grid", x1: x, x2: x, y1: y, y2: y + 4 }));
    parts.push(svg("text", { x, y: y + 17, "text-anchor": "middle" }, whole(i)));
  }
  parts.push(svg("text", { x: c.left - 8, y: y + 17, "text-anchor": "end" }, "node"));
  return parts;
};

const zoomTo = (from, to) => {
  const span = Math.min(count, Math.max(Math.min(4, count), Math.round(to - from)));
  sight.from = Math.min(count - span, Math.max(0, Math.round(from)));
  sight.to = sight.from + span;
  cursor = cursor === null ? null : Math.min(sight.to - 1, Math.max(sight.from, cursor));
  draw();
};
const zoomBy = (factor) => {
  const center = cursor === null ? (sight.from + sight.to) / 2 : cursor + 0.5;
  const span = (sight.to - sight.from) * factor;
  const share = (center - sight.from) / (sight.to - sight.from);
  zoomTo(center - share * span, center + (1 - share) * span);
};

const placeCursor = () => {
  const line = byId("cursor");
  if (!line) return;
  line.setAttribute("visibility", cursor === null ? "hidden" : "visible");
  if (cursor === null) return;
  const x = columns.middle(columns.find(cursor));
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
};

/** What the tooltip and the screen reader say of a column. */
const reading = (k) => {
  const i = face(k);
  const others = columns.first[k + 1] - columns.first[k] - 1;
  const lines = [["name", nodes.name[i]]];
  lines.push(["", [nodes.op[i], nodes.precision[i], nodes.provider[i]].filter(Boolean).join(" · ")]);
  if (nodes.quantized[i]) lines.push(["", nodes.quantized[i].text]);
  if (nodes.scope[i]) lines.push(["quiet", `in ${nodes.scope[i]}`]);
  const errors = [["local error", nodes.local[i]], ["accumulated", nodes.accumulated[i]], ["largest |x|", nodes.largest[i]]];
  const told = errors.filter(([, x]) => x !== null).map(([label, x]) => `${label} ${number(x)}`);
  const moved = values.of[i].find((v) => values.factor[v] !== 1 && values.largest[v] === nodes.largest[i]);
  if (moved !== undefined) told.push(`stored as ${number(asStored(nodes.largest[i], moved))}`);
  if (told.length) lines.push(["", told.join(" · ")]);
  const bad = nodes.messages(i).filter(([level]) => level > 1).map(([, text]) => text);
  if (bad.length) lines.push(["", bad[0]]);
  else if (nodes.reason[i]) lines.push(["quiet", nodes.reason[i]]);
  if (others) lines.push(["quiet", `and ${whole(others)} more here: nodes ${whole(columns.first[k])} to ${whole(columns.first[k + 1] - 1)}`]);
  return lines;
};

const tip = byId("tip");
const showTip = (k, clientX, clientY) => tell(reading(k), clientX, clientY);
const tell = (lines, clientX, clientY) => {
  tip.replaceChildren(...lines.map(([kind, text]) => element("bdi", { class: kind || "quieter" }, text, element("br"))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = clientX + 16 + box.width > innerWidth ? clientX - 16 - box.width : clientX + 16;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${Math.max(8, Math.min(innerHeight - box.height - 8, clientY + 14))}px`;
};
const hideTip = () => { tip.hidden = true; };

const columnAt = (clientX) => {
  const x = clientX - figure.getBoundingClientRect().left;
  if (!columns || x < columns.left - 4 || x > columns.left + columns.plot + 4) return null;
  return Math.min(columns.total - 1, Math.max(0, Math.floor((x - columns.left) / columns.step)));
};

const startFigure = () => {
  let pressed = null;
  let dragged = false;
  const select = (from, to) => {
    const area = byId("selection");
    area.setAttribute("visibility", from === null ? "hidden" : "visible");
    if (from === null) return;
    area.setAttribute("x", columns.x(Math.min(from, to)));
    area.setAttribute("width", (Math.abs(to - from) + 1) * columns.step);
  };
  figure.addEventListener("pointerdown", (event) => {
    pressed = event.button === 0 ? { k: columnAt(event.clientX), x: event.clientX } : null;
    dragged = false;
  });
  figure.addEventListener("pointermove", (event) => {
    const k = columnAt(event.clientX);
    if (pressed && pressed.k !== null && event.buttons && event.pointerType !== "touch" && Math.abs(event.clientX - pressed.x) > 5) {
      dragged = true;
      figure.setPointerCapture(event.pointerId);
      hideTip();
      if (k !== null) select(pressed.k, (pressed.last = k));
      return;
    }
    cursor = k === null ? null : face(k);
    placeCursor();
    if (k === null) hideTip();
    else showTip(k, event.clientX, event.clientY);
  });
  figure.addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const { k, last } = pressed;
    pressed = null;
    if (!dragged) {
      const now = columnAt(event.clientX);
      if (now !== null) goTo(face(now));
    } else if (last !== undefined) {
      const [a, b] = [Math.min(k, last), Math.max(k, last)];
      zoomTo(columns.first[a], columns.first[b + 1]);
    }
  });
  figure.addEventListener("pointercancel", () => { pressed = null; select(null); hideTip(); });
  figure.addEventListener("pointerleave", () => { hideTip(); if (!pressed) { cursor = null; placeCursor(); } });
  figure.addEventListener("dblclick", () => zoomTo(0, count));
  figure.addEventListener("keydown", onKey);
  figure.addEventListener("blur", hideTip);
  byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
  byId("zoom-out").addEventListener("click", () => zoomBy(2));
  byId("zoom-all").addEventListener("click", () => zoomTo(0, count));
  new ResizeObserver(() => { if (!columns || columns.width !== figure.clientWidth) draw(); }).observe(figure);
  draw();
};

const onKey = (event) => {
  const span = sight.to - sight.from;
  const k = cursor === null ? -1 : columns.find(cursor);
  const pan = event.shiftKey ? Math.max(1, Math.round(span / 4)) : 0;
  const moves = { ArrowRight: k + 1, ArrowLeft: k < 0 ? columns.total - 1 : k - 1, Home: 0, End: columns.total - 1 };
  if (pan && event.key === "ArrowRight") zoomTo(sight.from + pan, sight.to + pan);
  else if (pan && event.key === "ArrowLeft") zoomTo(sight.from - pan, sight.to - pan);
  else if (event.key in moves) {
    const next = Math.min(columns.total - 1, Math.max(0, moves[event.key]));
    cursor = face(next);
    placeCursor();
    const box = figure.getBoundingClientRect();
    showTip(next, box.left + columns.middle(next), Math.max(box.top, 0) + 24);
    byId("reading").textContent = reading(next).map(([, text]) => text).join(", ");
  } else if (event.key === "Enter" && cursor !== null) goTo(cursor);
  else if (event.key === "+" || event.key === "=") zoomBy(0.5);
  else if (event.key === "-") zoomBy(2);
  else if (event.key === "Escape") { zoomTo(0, count); hideTip(); }
  else return;
  event.preventDefault();
};
