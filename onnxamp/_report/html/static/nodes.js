/* The table of nodes: filters, order, pages, and the details of a row. */

const PAGE = 100;
const view = { rows: [], page: 0, key: "position", descending: false, open: null, here: null };

const several = new Set(nodes.provider.filter(Boolean)).size > 1;
const COLUMNS = [
  { key: "position", title: "#", of: (i) => i, first: false },
  { key: "name", title: "node", of: (i) => nodes.name[i], first: false },
  { key: "op", title: "op", of: (i) => nodes.op[i], first: false },
  { key: "precision", title: "precision", of: (i) => nodes.precision[i], first: false },
  { key: "why", title: nodes.reason.some(Boolean) ? "reason" : "remark", of: (i) => nodes.reason[i], first: false },
  { key: "local", title: "local", of: (i) => nodes.local[i], first: true, shown: has(values.local), hint: "relative L2 error of this op alone" },
  { key: "accumulated", title: "accumulated", of: (i) => nodes.accumulated[i], first: true, shown: has(values.accumulated), hint: "relative L2 error up to here" },
  { key: "largest", title: "max |x|", of: (i) => nodes.largest[i], first: true, shown: has(values.largest), hint: "largest magnitude of the reference" },
  { key: "provider", title: "runs on", of: (i) => nodes.provider[i], first: false, shown: several },
].map((column, position) => ({ ...column, position })).filter((column) => column.shown !== false);

/** Numbers before texts, NaN beyond infinity, and what is missing last in either direction. */
const compare = (of, descending) => {
  const sign = descending ? -1 : 1;
  return (i, j) => {
    const [a, b] = [of(i), of(j)];
    const [noA, noB] = [a === null || a === "", b === null || b === ""];
    if (noA || noB) return noA && noB ? i - j : noA ? 1 : -1;
    if (a === b || (Number.isNaN(a) && Number.isNaN(b))) return i - j;
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) ? sign : -sign;
    return a < b ? -sign : sign;
  };
};

/** The text that is searched, per node, in lower case; made by the first search. */
let haystack = null;
const searched = () => {
  haystack ??= nodes.name.map((name, i) =>
    [name, nodes.op[i], nodes.scope[i], nodes.quantized[i]?.text, nodes.reason[i], ...values.of[i].map((v) => values.name[v]), ...nodes.messages(i).map(([, text]) => text)].join("\n").toLowerCase()
  );
  return haystack;
};

const chosen = () => ({
  words: byId("search").value.toLowerCase().split(/\s+/).filter(Boolean),
  precision: byId("precision").value,
  op: byId("op").value,
  why: byId("why").value,
  trouble: byId("trouble").checked,
});

const clear = () => {
  for (const id of ["search", "precision", "op", "why"]) byId(id).value = "";
  byId("trouble").checked = false;
};

const update = (page = 0) => {
  const filter = chosen();
  const hay = filter.words.length ? searched() : null;
  const rows = [];
  for (let i = 0; i < count; i++) {
    if (filter.precision && nodes.precision[i] !== filter.precision.slice(1)) continue;
    if (filter.op && nodes.op[i] !== filter.op.slice(1)) continue;
    if (filter.why && nodes.why[i] !== filter.why.slice(1)) continue;
    if (filter.trouble && nodes.level[i] < 2) continue;
    if (hay && !filter.words.every((word) => hay[i].includes(word))) continue;
    rows.push(i);
  }
  const column = COLUMNS.find(({ key }) => key === view.key);
  if (view.key !== "position" || view.descending) rows.sort(compare(column.of, view.descending));
  view.rows = rows;
  show(page);
};

const show = (page) => {
  const pages = Math.max(1, Math.ceil(view.rows.length / PAGE));
  view.page = Math.min(pages - 1, Math.max(0, page));
  const from = view.page * PAGE;
  const rows = view.rows.slice(from, from + PAGE);
  const body = byId("table").tBodies[0];
  body.replaceChildren(...rows.flatMap(rowsOf));
  if (!rows.length) body.append(element("tr", {}, element("td", { colspan: COLUMNS.length, class: "muted" }, "No node matches these filters.")));
  byId("count").textContent = view.rows.length === count ? `${whole(count)} nodes` : `${whole(view.rows.length)} of ${whole(count)} nodes`;
  byId("place").textContent = `${whole(from + 1)} to ${whole(from + rows.length)} of ${whole(view.rows.length)}`;
  byId("pager").hidden = pages < 2;
  byId("previous").disabled = view.page === 0;
  byId("next").disabled = view.page === pages - 1;
};

const rowsOf = (i) => {
  const isOpen = view.open === i;
  const cells = COLUMNS.map((column) => cell(column.key, i, isOpen));
  const classes = ["row", view.here === i ? "here" : "", nodes.level[i] > 1 ? `level-${nodes.level[i]}` : ""].filter(Boolean);
  const row = element("tr", { class: classes.join(" "), id: `node-${i}` }, ...cells);
  row.addEventListener("click", (event) => { if (!getSelection().toString() || event.target.closest("button")) toggle(i); });
  return isOpen ? [row, details(i)] : [row];
};

const cell = (key, i, isOpen) => {
  const column = COLUMNS.find((one) => one.key === key);
  if (key === "position") {
    const trouble = nodes.level[i] > 1;
    const mark = trouble ? [element("span", { class: "dot", role: "img", "aria-label": nodes.level[i] > 2 ? "error" : "warning" })] : [];
    return element("td", { class: `muted position ${trouble ? `level-${nodes.level[i]}` : ""}` }, ...mark, whole(i));
  }
  if (key === "name") return element("td", { class: "name" }, element("button", { type: "button", "aria-expanded": String(isOpen) }, breakable(isOpen ? nodes.name[i] : shortened(nodes.name[i]))));
  if (key === "precision") {
    if (!nodes.precision[i]) return element("td");
    const grid = nodes.quantized[i];
    const mark = grid ? [element("br"), element("span", { class: `swatch ${grid.kind}` }), element("span", { class: "muted" }, grid.type)] : [];
    return element("td", { class: "precision" }, element("span", { class: `swatch ${nodes.precision[i].replace(" ", "-")}` }), nodes.precision[i], ...mark);
  }
  if (key === "why") {
    const bad = nodes.messages(i).filter(([level]) => level > 1).slice(0, 1);
    const told = bad.map(([level, text]) => element("bdi", { class: `trouble level-${level}` }, text));
    return element("td", { class: "why" }, ...told, element("bdi", {}, nodes.reason[i]));
  }
  const content = column.of(i);
  if (!column.first) return element("td", {}, element("bdi", {}, content));
  return element("td", { class: "number", "data-label": content === null ? null : column.title }, number(content));
};

const LEVELS = ["", "note", "warning", "error"];
const details = (i) => {
  const parts = [];
  const where = [nodes.quantized[i]?.text, nodes.scope[i] && `inside ${nodes.scope[i]}`, nodes.provider[i] && nodes.provider[i] !== "none" && `runs on ${nodes.provider[i]}`, nodes.provider[i] === "none" && "no kernel on the target"].filter(Boolean);
  if (where.length) parts.push(element("p", { class: "muted" }, element("bdi", {}, where.join(", "))));
  const list = nodes.messages(i).map(([level, text]) => element("li", {}, element("span", { class: `tag level-${level}` }, LEVELS[level]), " ", element("bdi", {}, text)));
  if (list.length) parts.push(element("ul", {}, ...list));
  if (values.of[i].length) parts.push(valueTable(i));
  if (!parts.length) parts.push(element("p", { class: "muted" }, "Nothing was measured or found here."));
  return element("tr", { class: "more" }, element("td", { colspan: COLUMNS.length }, ...parts));
};

const valueTable = (i) => {
  const isMoved = values.of[i].some((v) => values.factor[v] !== 1);
  const head = ["value", "type", "local error", "accumulated", "smallest |x|", "largest |x|", ...(isMoved ? ["stored as"] : [])];
  const rows = values.of[i].map((v) =>
    element("tr", {},
      element("td", { class: "name" }, breakable(values.name[v])), element("td", {}, values.dtype[v]),
      ...["local", "accumulated", "least", "largest"].map((key) => element("td", { class: "number" }, number(values[key][v], 4) || "–")),
      ...(isMoved ? [element("td", { class: "number" }, values.factor[v] === 1 ? "–" : `x · ${power("2", Math.log2(values.factor[v]))}`)] : []))
  );
  const titles = head.map((text, n) => element("th", { scope: "col", class: n > 1 ? "number" : null }, text));
  return element("table", {}, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows));
};

const toggle = (i) => {
  view.open = view.open === i ? null : i;
  show(view.page);
  byId(`node-${i}`)?.querySelector("button").focus({ preventScroll: true });
};

/** Scroll to the row of a node and mark it; filters that hide it are cleared. */
const reach = (i) => {
  if (!view.rows.includes(i)) {
    clear();
    update();
  }
  view.here = view.open = i;
  show(Math.floor(view.rows.indexOf(i) / PAGE));
  const row = byId(`node-${i}`);
  row.scrollIntoView({ block: "center" });
  row.querySelector("button").focus({ preventScroll: true });
};

/** Sort by a column, or reverse the order; errors start with the largest. */
const sortBy = (key) => {
  view.descending = view.key === key ? !view.descending : COLUMNS.find((column) => column.key === key).first;
  view.key = key;
  head();
  update();
};

const head = () => {
  const cells = COLUMNS.map(({ key, title, hint, first, position }) => {
    const isSorted = key === view.key;
    const arrow = isSorted ? (view.descending ? " ↓" : " ↑") : "";
    const button = element("button", { type: "button", title: hint || null, id: `by-${key}` }, title, element("span", { "aria-hidden": "true" }, arrow));
    button.addEventListener("click", () => { sortBy(key); byId(`by-${key}`).focus(); });
    return element("th", { scope: "col", class: `col-${position}${first ? " number" : ""}`, "aria-sort": isSorted ? (view.descending ? "descending" : "ascending") : null }, button);
  });
  byId("table").tHead.replaceChildren(element("tr", {}, ...cells));
  byId("sort").value = view.key;
};

/** Options of a filter with their counts, most frequent first; values start with "=", so that the empty text is not "all". */
const options = (select, column) => {
  const counts = new Map();
  for (const text of column) counts.set(text, (counts.get(text) || 0) + 1);
  const sorted = [...counts].sort(([a, n], [b, m]) => m - n || (a < b ? -1 : 1));
  select.replaceChildren(
    element("option", { value: "" }, "all"),
    ...sorted.map(([text, n]) => element("option", { value: `=${text}` }, `${text || "none"} (${whole(n)})`))
  );
  select.parentElement.hidden = counts.size < 2;
};

const startTable = () => {
  options(byId("precision"), nodes.precision);
  options(byId("op"), nodes.op);
  options(byId("why"), nodes.why);
  byId("sort").replaceChildren(...COLUMNS.map(({ key, title }) => element("option", { value: key }, title)));
  byId("trouble").parentElement.hidden = !nodes.level.some((level) => level > 1);
  head();
  update();
  let waiting = 0;
  byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(update, 120); });
  for (const id of ["precision", "op", "why", "trouble"]) byId(id).addEventListener("change", () => update());
  byId("sort").addEventListener("change", (event) => sortBy(event.target.value));
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => { clear(); update(); });
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  for (const button of document.querySelectorAll("[data-why]")) {
    button.addEventListener("click", () => {
      clear();
      byId("why").value = `=${button.dataset.why}`;
      update();
      byId("nodes").scrollIntoView();
    });
  }
};

const turn = (by) => {
  show(view.page + by);
  byId("nodes").scrollIntoView();
};
