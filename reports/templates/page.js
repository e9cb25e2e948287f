"use strict";
/* Sorts and filters the page's tables, draws figures from the embedded data, and stores the state
   of the view in the URL. Python has formatted all numbers but those at the axes of figures.
   The page unpacks the data into D before it runs this script. */
const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
const SVG = "http://www.w3.org/2000/svg";

/* Removes control characters and text-direction marks from names. */
const plain = text => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, "");
/* Creates an element with text content, so that names are never parsed as markup. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined).map(child => typeof child === "string" ? plain(child) : child));
  return element;
}

const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const num = value => (value === null || value === undefined ? NaN : Number(value));

/* Accessors for the entries of rows and the cells of subjects. */
const M = D.measures, ROWS = D.rows, SUBJECTS = D.subjects;
const siteMeasures = M.map((m, i) => i).filter(i => M[i].probe === "sites" && M[i].strip);
const lineMeasures = M.map((m, i) => i).filter(i => M[i].probe === "lines" && M[i].strip);
const cellOf = (subject, measure) => D.cells[subject][measure];
/* The cell for a row: the mean over seeds at each place, or else that of the first seed. */
const rowCell = (row, measure) => ROWS[row].means[measure] || cellOf(ROWS[row].subjects[0], measure);
const places = cell => ("p" in cell ? D.names[cell.p] : []);
const placeValues = cell => ("c" in cell && cell.c.value ? cell.c.value.map(num) : []);
const placeTexts = cell => cell.f || [];
const halves = cell => (cell.h || []).map(num);
const kindsOf = cell => ("p" in cell ? D.kinds[cell.p] : []);
const remarkOf = (cell, index) => (cell.m || []).find(([place]) => place === index);
/* The state of the view, stored in the URL's fragment. */
const firstSorted = $("th[aria-sort]"), firstSites = M.find(m => m.probe === "sites" && m.strip);
const START = {
  q: "", sort: firstSorted ? M[+firstSorted.dataset.column].name : "", back: "", show: "values", spread: "", base: "", hide: "",
  strip: $("#strip-measure") ? $("#strip-measure").textContent : firstSites ? firstSites.name : "", over: "", agree: "", x: "", y: "", by: "", line: "", one: firstSorted ? M[+firstSorted.dataset.column].name : (M[0] || {name: ""}).name, subject: D.single ? ROWS[0].label : "", open: "", all: "", family: "", weights: "", data: "", seed: "", run: "",
};
const state = {...START};
const LISTS = ["hide", "over", "open", "family", "weights", "data", "seed", "run"];
const list = key => (state[key] ? state[key].split(",").map(decodeURIComponent) : []);
const setList = (key, values) => { state[key] = values.map(encodeURIComponent).join(","); };
function readHash() {
  Object.assign(state, START);
  for (const part of location.hash.slice(1).split("&")) {
    const [key, value = ""] = part.split("=");
    if (!(key in START)) continue;
    try { state[key] = LISTS.includes(key) ? value : decodeURIComponent(value); } catch { /* not ours */ }
  }
}
function hashOf() {
  return Object.keys(START).filter(key => state[key] !== START[key])
    .map(key => key + "=" + (LISTS.includes(key) ? state[key] : encodeURIComponent(state[key]))).join("&");
}
let written = null;
function writeHash() {
  written = hashOf();
  const target = "#" + written;
  if (target !== location.hash && !(written === "" && location.hash === "")) history.replaceState(null, "", target);
}
const measureIndex = name => M.findIndex(m => m.name === name);

/* ---- The leaderboard ---- */
const board = $("#board");
const body = board && board.tBodies[0];
const lines = body ? $$("tr", body) : [];
const SHIFT = $("th.print") ? 2 : 1;
/* Maximum number of rows shown initially, since sorting more is slow; the rest are shown on demand. */
const MAX_ROWS = ROWS.length > 100 ? 60 : ROWS.length;
const fitting = ROWS.map(() => true);
const visible = row => fitting[row];
let order = ROWS.map((_, row) => row);
function showRows(all = state.all !== "") {
  let shown = 0, waiting = 0;
  for (const row of order) {
    const hidden = !fitting[row] || (!all && shown >= MAX_ROWS);
    if (lines[row].hidden !== hidden) lines[row].hidden = hidden;
    if (!hidden) refreshStrip(row);
    if (!hidden) shown++; else if (fitting[row]) waiting++;
  }
  const more = $("#more");
  if (more) { more.hidden = waiting === 0; more.textContent = `Show ${waiting} more`; }
}
addEventListener("beforeprint", () => board && showRows(true));
addEventListener("afterprint", () => board && showRows());
function facetsOf(row) {
  const first = SUBJECTS[ROWS[row].subjects[0]];
  return {family: [first.family], weights: [first.weights], data: [first.data], run: [first.run], seed: ROWS[row].subjects.map(s => String(SUBJECTS[s].seed))};
}
const FACETS = ["family", "weights", "data", "seed", "run"].map(key => [key, [...new Set(ROWS.flatMap((_, row) => facetsOf(row)[key]))].filter(v => v !== "")]).filter(([, values]) => values.length > 1);
const facetCache = ROWS.map((_, row) => facetsOf(row));
const searchCache = ROWS.map(row => row.subjects.map(s => [SUBJECTS[s].label, SUBJECTS[s].model, SUBJECTS[s].weights, SUBJECTS[s].data, SUBJECTS[s].family, SUBJECTS[s].run].join(" ")).join(" ").toLowerCase());

/* A value with its error, as it is written in sentences. */
const valueText = entry => [entry.text, entry.error].filter(Boolean).join(" ");
function cellTexts(row, measure) {
  const entry = ROWS[row].cells[measure];
  const value = num(entry.value);
  if (entry.s !== "ok" || !Number.isFinite(value)) return null;
  const base = state.base === "" ? -1 : ROWS.findIndex(r => r.label === state.base);
  const shown = D.differences[base];
  if (state.show === "ranks") return [entry.rank === null ? "–" : (entry.tied ? "=" : "") + entry.rank, entry.ranks];
  if (shown && base !== row) {
    const [change, error] = (shown[row][measure] || "–").split(" ± ");
    return [change, error ? "± " + error : ""];
  }
  return [entry.text, state.spread ? entry.range : [entry.error, entry.ranks].filter(Boolean).join(" · ")];
}
function drawCells() {
  lines.forEach((line, row) => {
    line.classList.toggle("base", state.base !== "" && ROWS[row].label === state.base);
    M.forEach((_, measure) => {
      const texts = cellTexts(row, measure);
      if (!texts) return;
      const cell = line.cells[measure + SHIFT];
      const bold = cell.firstChild, small = cell.lastChild;
      if (bold.firstChild.data !== texts[0]) bold.firstChild.data = texts[0];
      if (small.textContent !== texts[1]) small.replaceChildren(h("span", {}, texts[1]));
    });
  });
}
const drawnState = {};
const changed = (name, ...keys) => {
  const now = keys.map(key => state[key]).join("\u0001");
  const differs = drawnState[name] !== now;
  drawnState[name] = now;
  return differs;
};
function drawBoard() {
  if (!board) return;
  if (changed("cells", "show", "spread", "base")) drawCells();
  if (changed("filter", "q", ...FACETS.map(([key]) => key))) {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = FACETS.map(([key]) => [key, list(key)]).filter(([, values]) => values.length);
    let shown = 0;
    ROWS.forEach((_, row) => {
      fitting[row] = words.every(word => searchCache[row].includes(word)) && wanted.every(([key, values]) => facetCache[row][key].some(v => values.includes(v)));
      shown += fitting[row];
    });
    const status = $("#shown");
    if (status) status.textContent = shown === ROWS.length ? "" : `${shown} of ${ROWS.length} networks`;
    drawnState.rows = null;
  }
  if (changed("sort", "sort", "back")) sortBoard();
  if (changed("rows", "all")) showRows();
  if (changed("hide", "hide", "one")) hideColumns();
  if (changed("strip", "strip")) drawStrips();
  if (changed("open", "open")) openSeeds();
}
function sortBoard() {
  const measure = measureIndex(state.sort);
  const back = state.back ? -1 : 1;
  order = ROWS.map((_, row) => row);
  if (measure >= 0) {
    const sense = M[measure].sense || 1;
    const key = ROWS.map(row => (row.cells[measure].s === "ok" ? sense * num(row.cells[measure].value) : NaN));
    order.sort((a, b) => (Number.isNaN(key[a]) - Number.isNaN(key[b])) || back * (key[b] - key[a]) || a - b);
  } else if (state.sort === "name") {
    const compare = new Intl.Collator(undefined, {numeric: true}).compare;
    order.sort((a, b) => back * compare(ROWS[a].label, ROWS[b].label) || a - b);
  }
  $$("tr.seed", body).forEach(line => line.remove());
  drawnState.open = null;
  // Hide rows before moving them, since hidden rows are not laid out.
  showRows();
  body.append(...order.map(row => lines[row]));
  $$("thead [data-column]", board).forEach(head => {
    const column = head.dataset.column;
    const mine = column === "name" ? state.sort === "name" : +column === measure;
    if (!mine) return head.removeAttribute("aria-sort");
    const down = column === "name" ? !!state.back : (M[measure].sense || 1) * back > 0;
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  });
}
function hideColumns() {
  const hidden = new Set(list("hide").map(measureIndex));
  let style = $("#hidden-columns");
  if (!style) document.head.append(style = h("style", {id: "hidden-columns"}));
  const chosen = Math.max(0, measureIndex(state.one)) + 1 + SHIFT;
  style.textContent = [...hidden].filter(i => i >= 0).map(i => `.board tr:not(.groups) > :nth-child(${i + 1 + SHIFT}) { display: none; }`).join("\n")
    + `\n@media screen and (max-width: 720px) { .board .groups, .board .num { display: none; } .board tr:not(.groups) > .num:nth-child(${chosen}) { display: table-cell; } }`;
  let column = 0;
  $$(".groups th", board).forEach(head => {
    const size = +(head.dataset.size || (head.dataset.size = head.colSpan));
    const left = Array.from({length: size}, (_, i) => column + i).filter(i => !hidden.has(i)).length;
    column += size;
    head.hidden = left === 0;
    if (left) head.colSpan = left;
  });
}
function openSeeds() {
  $$("tr.seed", body).forEach(line => line.remove());
  const open = new Set(list("open"));
  ROWS.forEach((row, index) => {
    const button = $(".seeds", lines[index]);
    if (!button) return;
    button.setAttribute("aria-expanded", open.has(row.label));
    if (!open.has(row.label)) return;
    const seedLines = row.subjects.map(subject => {
      const line = h("tr", {class: "seed", "data-subject": subject}, h("th", {scope: "row"}, h("a", {href: "#subject=" + encodeURIComponent(SUBJECTS[subject].label)}, "seed " + SUBJECTS[subject].seed)));
      if (SHIFT === 2) line.append(h("td", {class: "print"}, stripOf(cellOf(subject, measureIndex(state.strip)), measureIndex(state.strip)) || ""));
      M.forEach((_, measure) => {
        const cell = cellOf(subject, measure), value = num((cell.t || {}).value);
        const fine = cell.s === "ok" && Number.isFinite(value);
        line.append(fine ? h("td", {class: "num", "data-v": value}, ...valueParts(cell.v)) : missing(cell.s, cell.r));
      });
      return line;
    });
    lines[index].after(...seedLines);
  });
}
const valueParts = text => { const [value, error] = text.split(" ± "); return [h("b", {}, value), h("small", {}, error ? h("span", {}, "± " + error) : null)]; };
const missing = (status, reason) => h("td", {class: "num none " + status}, h("b", {}, status), h("small", {}, reason || ""));

/* ---- Strips ---- */
const kindIndex = kind => Math.max(0, Math.min(4, D.kindOrder.indexOf(kind)));
function stripOf(cell, measure) {
  if (!cell.l) return null;
  const kinds = kindsOf(cell).map(kind => (kindIndex(kind) ? " k" + kindIndex(kind) : ""));
  const label = `${M[measure].name} from input to output: ${rangeOf(placeValues(cell), placeTexts(cell))}`;
  return h("span", {class: "strip" + (cell.l.length > 60 ? " many" : ""), role: "img", "aria-label": label}, [...cell.l].map((level, site) => h("i", {class: `q${level}${kinds[site] || ""}`})));
}
const drawnStrips = ROWS.map(() => START.strip);
function refreshStrip(row) {
  if (SHIFT !== 2 || drawnStrips[row] === state.strip) return;
  drawnStrips[row] = state.strip;
  const measure = measureIndex(state.strip), drawn = stripOf(rowCell(row, measure), measure);
  lines[row].cells[1].replaceChildren(...(drawn ? [drawn] : []));
}
function drawStrips() {
  const measure = measureIndex(state.strip);
  if (SHIFT !== 2 || measure < 0) return;
  lines.forEach((line, row) => { if (!line.hidden) refreshStrip(row); });
  $("#strip-measure").textContent = state.strip;
  const scale = M[measure].strip;
  const ramp = $("#ramp").children;
  ramp[0].textContent = M[measure].name + " " + scale.least;
  ramp[2].textContent = scale.most + (M[measure].sense ? ", more nonlinear" : ", more") + ` (${scale.source})`;
  drawnState.open = null;
}

/* ---- Tooltips ---- */
const tip = $("#tip");
function showTip(text, event) {
  tip.textContent = text;
  if (!text) return;
  const {width, height} = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(innerWidth - width - 4, event.clientX + 12)) + "px";
  tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18) + "px";
}
function describe(row, measure) {
  const entry = ROWS[row].cells[measure], m = M[measure];
  if (entry.s !== "ok") return `${m.name}, ${ROWS[row].label}: ${entry.s}: ${entry.r}`;
  const parts = [`${m.name} ${valueText(entry)}${m.scale ? `, ${m.scale}` : ""}`];
  if (entry.interval) parts.push(`${D.confidence} % interval ${entry.interval}`);
  if (entry.over && entry.over !== "exact") parts.push("± over " + entry.over);
  if (entry.range) parts.push("range " + entry.range);
  if (entry.best !== null) parts.push(`${entry.rank - 1} clearly more nonlinear; rank between ${entry.best} and ${entry.worst} of ${ROWS.filter(r => r.cells[measure].rank !== null).length}`);
  if (entry.reference) parts.push(`more nonlinear than ${entry.reference} of the reference networks`);
  if (entry.n) parts.push(`${entry.n} samples`);
  if (entry.r) parts.push(entry.r);
  return parts.join("; ");
}
function stripSite(event) {
  const svg = event.target.closest(".strip");
  const line = event.target.closest("tr[data-row]");
  if (!svg || !line) return null;
  const box = svg.getBoundingClientRect();
  const cell = rowCell(+line.dataset.row, measureIndex(state.strip));
  const names = places(cell);
  const site = Math.min(names.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * names.length)));
  return siteText(cell, site, measureIndex(state.strip));
}
function siteText(cell, site, measure) {
  const remark = remarkOf(cell, site);
  const kind = kindsOf(cell)[site];
  const text = placeTexts(cell)[site] || (remark ? `${remark[1]}: ${remark[2]}` : "no value");
  return `${places(cell)[site]}${kind ? ` (${kind})` : ""}: ${M[measure].name} ${text}`;
}
if (body) {
  body.addEventListener("pointermove", event => {
    const site = stripSite(event);
    if (site) return showTip(site, event);
    const cell = event.target.closest("td.num");
    const line = event.target.closest("tr[data-row]");
    showTip(cell && line ? describe(+line.dataset.row, cell.cellIndex - SHIFT) : "", event);
  });
  body.addEventListener("pointerleave", () => showTip(""));
  const open = td => {
    const {row, subject} = td.parentNode.dataset, measure = td.cellIndex - SHIFT;
    showRecord(row ? ROWS[+row].subjects : [+subject], measure, row ? describe(+row, measure) : "");
  };
  body.addEventListener("keydown", event => {
    const td = event.target, {key} = event;
    if (!td.matches("td.num")) return;
    if (key === "Enter") { event.preventDefault(); open(td); }
    const along = {ArrowLeft: "previousElementSibling", ArrowUp: "previousElementSibling", ArrowRight: "nextElementSibling", ArrowDown: "nextElementSibling"}[key];
    if (!along) return;
    event.preventDefault();
    const down = key === "ArrowUp" || key === "ArrowDown";
    let next = td;
    do next = down ? ((next.parentNode[along] || {}).cells || [])[td.cellIndex] : next[along]; while (next && !next.offsetParent);
    if (next && next.matches("td.num")) { td.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  });
  const firstCell = $("td.num", body);
  if (firstCell) firstCell.tabIndex = 0;
  body.addEventListener("click", event => {
    const td = event.target.closest("td.num");
    if (td) open(td);
    const strip = event.target.closest("td.print .strip");
    const line = event.target.closest("tr[data-row]");
    if (strip && line) toggleOver(ROWS[+line.dataset.row].label, true);
  });
}

/* ---- The record of a cell, seed by seed ---- */
function showRecord(subjects, measure, summary) {
  const m = M[measure], dialog = $("#record"), alone = subjects.length === 1;
  const parts = subjects.flatMap((subject, place) => {
    const cell = cellOf(subject, measure), one = SUBJECTS[subject], value = num((cell.t || {}).value);
    const facts = {value: Number.isFinite(value) ? `${cell.v} (${value})` : cell.s, [cell.s === "ok" ? "note" : "reason"]: cell.r, samples: cell.count, "own time": cell.sec || "", "shared pass": cell.pass || "",
      "peak memory": cell.mem || "", options: place ? "" : (D.settings[Math.max(0, D.runs.indexOf(one.run))][m.name] || ""), weights: one.facts["weights hash"], record: cell.i ? `cells/${cell.i}.json` : ""};
    return [alone ? null : h("h4", {}, one.label),
      h("dl", {}, Object.entries(facts).filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {class: /weights|record/.test(name) ? "code" : null}, text)])),
      "tb" in cell ? h("pre", {tabindex: "0"}, D.traces[cell.tb]) : null];
  });
  const title = alone ? SUBJECTS[subjects[0]].label : ROWS.find(row => row.subjects === subjects).label;
  dialog.replaceChildren(h("div", {}, h("h3", {tabindex: "-1", autofocus: true}, `${m.name} of ${title}`), alone ? null : h("p", {}, summary), parts, h("button", {type: "button", class: "plain", onclick: () => dialog.close()}, "Close")));
  dialog.showModal();
}

/* ---- Downloads ---- */
function download(name, text, type) {
  const link = h("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
let copied = "";
async function copy(text) {
  copied = text;
  try { await navigator.clipboard.writeText(text); } catch {
    const area = h("textarea", {style: "position:fixed;left:-99em"});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
/* The apostrophe prevents spreadsheets from parsing a cell as a formula; nlbench.reports.exports removes it. */
const neutral = text => (/^['=+\-@\t\r]/.test(text) ? "'" + text : text);
const csvCell = value => {
  const text = typeof value === "number" ? (Number.isNaN(value) ? "" : String(value)) : neutral(String(value ?? ""));
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const toCsv = rows => rows.map(row => row.map(csvCell).join(",")).join("\n") + "\n";
const slash = text => String(text).replaceAll("\\", "\\\\").replaceAll("|", "\\|").replaceAll("\n", " ").replaceAll("<", "&lt;");
function view() {
  const hidden = new Set(list("hide").map(measureIndex));
  const columns = M.map((_, i) => i).filter(i => !hidden.has(i));
  const shown = order.filter(visible);
  const head = ["network", ...columns.map(i => M[i].name)];
  const cells = shown.map(row => [ROWS[row].label, ...columns.map(i => {
    const texts = cellTexts(row, i);
    if (!texts) return ROWS[row].cells[i].s;
    return texts[0] + (state.spread && state.show === "values" && texts[1] ? " " + texts[1] : "");
  })]);
  return {columns, order: shown, head, cells};
}
function asMarkdown() {
  const {head, cells} = view();
  const line = row => "| " + row.map(slash).join(" | ") + " |";
  return [line(head), "| --- |" + " ---: |".repeat(head.length - 1), ...cells.map(line)].join("\n") + "\n";
}
const asLatex = () => $("#latex").content.textContent;
function asCsv() {
  const {columns, order} = view();
  const head = ["run", "model", "weights", "data", "seeds", ...columns.flatMap(i => [M[i].name, M[i].name + " low", M[i].name + " high", M[i].name + " rank", M[i].name + " status"])];
  return toCsv([head, ...order.map(row => {
    const first = SUBJECTS[ROWS[row].subjects[0]];
    return [first.run, first.model, first.weights, first.data, ROWS[row].subjects.map(s => SUBJECTS[s].seed).join(" "), ...columns.flatMap(i => {
      const entry = ROWS[row].cells[i];
      return [num(entry.value), num(entry.low), num(entry.high), entry.rank === null ? NaN : entry.rank, entry.s];
    })];
  })]);
}
function tidy() {
  const rows = [["run", "model", "weights", "data", "seed", "measure", "place", "statistic", "value", "n", "status", "reason"]];
  SUBJECTS.forEach((subject, s) => M.forEach((m, i) => {
    const cell = cellOf(s, i);
    if (cell.s === "absent" || m.derived) return;
    const key = [subject.run, subject.model, subject.weights, subject.data, subject.seed, m.name];
    for (const [name, value] of Object.entries(cell.t || {value: "NaN"})) rows.push([...key, "", name, num(value), cell.n, cell.s, cell.r || ""]);
    places(cell).forEach((place, index) => {
      const [, status, reason] = remarkOf(cell, index) || [index, "ok", ""];
      const n = Array.isArray(cell.k) ? cell.k[index] : cell.k;
      const numbers = Object.entries(cell.c).filter(([, column]) => column[index] !== null);
      for (const [name, column] of numbers.length ? numbers : [["value", null]]) rows.push([...key, place, name, column ? num(column[index]) : NaN, n, status, reason]);
    });
  }));
  return toCsv(rows);
}

/* ---- Figures: lists of marks, rendered as SVG with the page's colours or, for download, with fixed ones ---- */
const INK = {ink: "#17191e", quiet: "#5b6270", rule: "#e1e4ea", c0: "#0b6fb8", c1: "#c85a08", c2: "#0d8266", c3: "#b34a8b", c4: "#16181d", c5: "#a07800", c6: "#3f9bd0", c7: "#71767f", q0: "#f4f1f8", q1: "#e2e6f2", q2: "#c9d8ea", q3: "#abc8e1", q4: "#87b2d6", q5: "#6099c8", q6: "#3878b0", q7: "#23639e", q8: "#10457e", q9: "#05234f", none: "#b3b8c2", above: "#8fb2d4", below: "#e8c3a9"};
const DASHES = ["", "6 2", "2 2", "7 2 2 2", "4 4", "1 3", "9 3", "3 1"];
const esc = text => plain(String(text)).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const r1 = x => (Math.round(10 * x) / 10).toString();
/* The width of a figure is limited by that of the window. */
const room = most => Math.max(330, Math.min(most, innerWidth - 48));
class Figure {
  constructor(width, height, title) { this.width = width; this.height = height; this.title = title; this.items = []; this.rows = []; }
  line(points, colour, {width = 1, dash = 0, fill = null, alpha = 1, data = null} = {}) { if (points.length) this.items.push({type: "line", points, colour, width, dash, fill, alpha, data}); return this; }
  mark(x, y, kind, colour, size = 3, data = null, hollow = false) { this.items.push({type: "mark", x, y, kind, colour, size, data, hollow}); return this; }
  text(x, y, text, {anchor = "start", size = 10, colour = "quiet", turn = 0} = {}) { this.items.push({type: "text", x, y, text, anchor, size, colour, turn}); return this; }
  outline({x, y, kind, size: s}) {
    if (kind === 1) return [[x - s, y - s], [x + s, y - s], [x + s, y + s], [x - s, y + s]];
    if (kind === 2) return [[x, y - 1.25 * s], [x + 1.15 * s, y + s], [x - 1.15 * s, y + s]];
    if (kind === 3) return [[x, y - 1.35 * s], [x + 1.35 * s, y], [x, y + 1.35 * s], [x - 1.35 * s, y]];
    if (kind === 4) return [[x, y + 1.25 * s], [x + 1.15 * s, y - s], [x - 1.15 * s, y - s]];
    return null;
  }
  svg(alone) {
    const paint = name => (alone ? INK[name] : `var(--${name}, ${INK[name]})`);
    const out = [];
    for (const item of this.items) {
      if (item.type === "line") {
        const d = item.points.map((p, i) => (p ? (i && item.points[i - 1] ? "L" : "M") + r1(p[0]) + " " + r1(p[1]) : "")).join("");
        const look = item.fill ? `fill="${paint(item.fill)}" fill-opacity="${item.alpha}" stroke="none"` : `fill="none" stroke="${paint(item.colour)}" stroke-width="${item.width}"${item.dash ? ` stroke-dasharray="${DASHES[item.dash]}"` : ""}`;
        out.push(`<path d="${d}" ${look}${item.data && !alone ? ` data-tip="${esc(item.data)}"` : ""}/>`);
      } else if (item.type === "mark") {
        const points = this.outline(item);
        const look = item.hollow ? `fill="none" stroke="${paint(item.colour)}"` : `fill="${paint(item.colour)}"`;
        const data = item.data && !alone ? ` data-tip="${esc(item.data)}"` : "";
        out.push(points ? `<path d="M${points.map(p => p.map(r1).join(" ")).join("L")}z" ${look}${data}/>` : `<circle cx="${r1(item.x)}" cy="${r1(item.y)}" r="${item.size}" ${look}${data}/>`);
      } else {
        const turn = item.turn ? ` transform="rotate(${item.turn} ${r1(item.x)} ${r1(item.y)})"` : "";
        out.push(`<text x="${r1(item.x)}" y="${r1(item.y)}" font-size="${item.size}" text-anchor="${item.anchor}" fill="${paint(item.colour)}"${turn}>${esc(item.text)}</text>`);
      }
    }
    const outer = alone ? ` width="${this.width}" height="${this.height}" font-family="Helvetica, Arial, sans-serif"` : "";
    return `<svg xmlns="${SVG}" class="chart" role="img" viewBox="0 0 ${this.width} ${this.height}"${outer}><title>${esc(this.title)}</title>${out.join("")}</svg>`;
  }
  csv() { return toCsv(this.rows); }
  /* Returns the figure with its legend, which is separate on the page. */
  withKeys() {
    if (!this.keys) return this;
    const whole = new Figure(this.width, this.height + 15 * this.keys.length + 8, this.title);
    whole.items.push(...this.items);
    this.keys.forEach((label, i) => {
      const y = this.height + 8 + 15 * i;
      whole.line([[60, y], [90, y]], "c" + i % 8, {width: 1.6, dash: i % 8}).mark(75, y, i % 5, "c" + i % 8, 3).text(98, y + 3.5, label, {colour: "ink"});
    });
    return whole;
  }
  tools(name) {
    const file = name.replace(/[^\w.-]+/g, "-");
    const save = () => download(file + ".svg", this.withKeys().svg(true), "image/svg+xml");
    return h("span", {class: "tools"},
      h("button", {type: "button", "aria-label": `${name} as SVG`, onclick: save}, "SVG"),
      h("button", {type: "button", "aria-label": `${name}: data as CSV`, onclick: () => download(file + ".csv", this.csv(), "text/csv")}, "CSV"));
  }
  element() {
    const holder = h("div");
    holder.innerHTML = this.svg(false); // svg() escapes all names
    holder.firstChild.style.maxWidth = Math.round(1.4 * this.width) + "px";
    return holder.firstChild;
  }
}
function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(k => k * power).find(s => s >= rough * 0.999);
  const positions = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-6; k++) positions.push(+(k * step).toPrecision(12));
  return positions;
}
function logTicks(low, high) {
  const powers = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) powers.push(10 ** k);
  const inside = powers.filter(v => v >= low * 0.999 && v <= high * 1.001);
  if (inside.length >= 2) return inside.filter((_, i) => i % Math.ceil(inside.length / 5) === 0);
  return [low, high].map(v => +v.toPrecision(2));
}
const tickText = v => (v !== 0 && (Math.abs(v) >= 1e6 || Math.abs(v) < 1e-3) ? v.toExponential(0).replace("e+", "e") : String(+v.toPrecision(6))).replaceAll("-", "−");
/* Returns an axis: a function from values to coordinates between two ends. */
function axis(values, from, to, {log = false, pad = 0.04, low = null, high = null} = {}) {
  const finite = values.filter(Number.isFinite);
  let a = low ?? Math.min(...finite), b = high ?? Math.max(...finite);
  if (!finite.length && low === null) [a, b] = [0, 1];
  log = log && a > 0;
  const go = log ? Math.log : v => v;
  let [x, y] = [go(a), go(b)];
  if (!(y > x)) { const half = Math.abs(x) * 0.05 || 0.5; x -= half; y += half; } else { const room = pad * (y - x); if (low === null) x -= room; if (high === null) y += room; }
  const at = v => from + (go(v) - x) / (y - x) * (to - from);
  const back = log ? Math.exp : v => v;
  at.ticks = log ? logTicks(back(x), back(y)) : ticks(back(x), back(y));
  return at;
}
const wide = (values, factor = 50) => { const finite = values.filter(Number.isFinite); const low = Math.min(...finite); return finite.length > 1 && low > 0 && Math.max(...finite) > factor * low; };
function frame(figure, x, y, left, top, right, bottom, xlabel, ylabel) {
  for (const v of y.ticks) figure.line([[left, y(v)], [right, y(v)]], "rule").text(left - 6, y(v) + 3.5, tickText(v), {anchor: "end"});
  if (x) for (const v of x.ticks) figure.line([[x(v), bottom], [x(v), bottom + 4]], "quiet").text(x(v), bottom + 15, tickText(v), {anchor: "middle"});
  figure.line([[left, bottom], [right, bottom]], "quiet");
  if (xlabel) figure.text((left + right) / 2, bottom + (x ? 30 : 16), xlabel, {anchor: "middle", size: 11});
  if (ylabel) figure.text(left - 40, (top + bottom) / 2, ylabel, {anchor: "middle", size: 11, turn: -90});
}
document.addEventListener("pointermove", event => {
  const mark = event.target.closest && event.target.closest("[data-tip]");
  if (mark) showTip(mark.dataset.tip, event);
  else if (!(body && body.contains(event.target))) showTip("");
});

/* ---- Over training: one panel per measure, one curve per training run ---- */
const MAX_CURVES = 60;
function drawCurves() {
  const holder = $("#curves");
  if (holder && !holder.children.length) holder.append(...M.map((_, measure) => curves(measure)).filter(Boolean));
}
function curves(measure) {
  const T = D.trainings, m = M[measure], alone = T.length === 1;
  const valueAt = row => num(ROWS[row].cells[measure].value);
  const known = T.flatMap(t => t.rows.map(valueAt)).filter(Number.isFinite), top = alone ? T[0].top[m.name] : "";
  if (!known.some(value => value !== known[0]) && !top) return null;
  const thin = alone && m.probe !== "lines" ? T[0].rows.map(row => { const cell = rowCell(row, measure); return new Map(places(cell).map((name, i) => [name, placeValues(cell)[i]])); }) : [];
  const names = thin.length && thin[0].size > 1 && thin[0].size <= MAX_CURVES ? [...thin[0].keys()] : [];
  const band = row => { const entry = ROWS[row].cells[measure]; return [num(entry.low), num(entry.high)]; };
  const width = 360, height = 200, left = 56, right = width - 10, above = 8, bottom = height - 38;
  const figure = new Figure(width, height, `${m.name} over training`);
  const values = T.flatMap(t => t.rows.flatMap(row => [valueAt(row), ...band(row)])).concat(thin.flatMap(map => names.map(name => map.get(name))));
  const steps = T.flatMap(t => t.steps), unit = [...new Set(T.map(t => t.unit))].join(", ");
  const x = axis(steps, left, right, {log: wide(steps)}), y = axis(values, bottom, above, {log: wide(values)});
  if (new Set(steps).size < 8) x.ticks = [...new Set(steps)];
  frame(figure, x, y, left, above, right, bottom, unit);
  figure.rows = [["training", unit, "place", m.name, "low", "high"]];
  const draw = (t, label, at, colour, style) => {
    figure.line(gaps(t.rows.map((row, i) => (Number.isFinite(at(row, i)) ? [x(t.steps[i]), y(at(row, i))] : null))), colour, style);
    t.rows.forEach((row, i) => { if (label) figure.rows.push([t.label, t.steps[i], label, at(row, i), NaN, NaN]); });
  };
  for (const name of [...names.filter(name => name !== top), ...names.filter(name => name === top)])
    draw(T[0], name, (_, i) => thin[i].get(name) ?? NaN, name === top ? "c1" : "none", {width: name === top ? 1.4 : 0.9, data: name});
  T.forEach((t, k) => {
    const colour = "c" + k % 8, ends = t.rows.map(band), kept = t.rows.map((_, i) => i).filter(i => Number.isFinite(ends[i][0]));
    if (kept.length > 1) figure.line([...kept.map(i => [x(t.steps[i]), y(ends[i][1])]), ...kept.reverse().map(i => [x(t.steps[i]), y(ends[i][0])])], colour, {fill: colour, alpha: 0.18});
    draw(t, "", valueAt, colour, {width: 2, dash: k % 8});
    t.rows.forEach((row, i) => {
      figure.rows.push([t.label, t.steps[i], "", valueAt(row), ...band(row)]);
      if (Number.isFinite(valueAt(row))) figure.mark(x(t.steps[i]), y(valueAt(row)), k % 5, colour, 2.8, `${t.label} ${unit} ${t.steps[i]}: ${describe(row, measure)}`);
    });
  });
  if (!alone) figure.keys = T.map(t => t.label);
  return h("figure", {}, h("figcaption", {}, h("b", {}, m.name), names.includes(top) ? h("span", {}, "most changed: ", h("i", {style: "color:var(--kind1)"}, top)) : null), figure.keys ? keys(figure.keys) : null, figure.element(), figure.tools(`${m.name} over training`));
}

/* ---- Linearised networks: accuracy vs. path length, and the nonlinear units in each layer ---- */
const MODES = {"post-training": "linearised after training", "from-start": "linearised from the start", random: "random units linear"};
function drawTradeoffs() {
  $$(".tradeoff").forEach((holder, i) => { if (!holder.children.length) holder.append(tradeoff(D.tradeoffs[i]), coreShape(D.tradeoffs[i])); });
}
function tradeoff(t) {
  const width = room(600), height = 340, [left, right, top, bottom] = [62, width - 30, 14, height - 42];
  const figure = new Figure(width, height, `Accuracy vs. path length for ${t.label}`), points = t.modes.flatMap(mode => mode.groups.flatMap(([, group, [a, b], [da, db]]) => [...group, [a - da, b - db], [a + da, b + db]]));
  const x = axis(points.map(p => p[0]), left, right), y = axis([...points.map(p => p[1]), num(t.reference)], bottom, top);
  frame(figure, x, y, left, top, right, bottom, "average path length: active nonlinearities on a path", "test accuracy, %");
  figure.rows = [["mode", "ω", "path length", "accuracy, %"]];
  if (t.reference !== null) figure.line([[left, y(t.reference)], [right, y(t.reference)]], "quiet", {dash: 1}).text(left + 4, y(t.reference) - 4, "as trained, no linear units", {size: 9});
  t.modes.forEach(({mode, groups}, k) => {
    const colour = "c" + k;
    const means = groups.map(([omega, group, [a, b], [da, db], text]) => {
      for (const p of group) { figure.rows.push([MODES[mode], omega, ...p]); figure.mark(x(p[0]), y(p[1]), k, colour, 2); }
      figure.line([[x(a - da), y(b)], [x(a + da), y(b)]], colour).line([[x(a), y(b - db)], [x(a), y(b + db)]], colour);
      figure.mark(x(a), y(b), k, colour, 4.5, `${MODES[mode]}, ω ${omega}: ${text}`);
      if (mode !== "random") figure.text(x(a) + 6, y(b) + (k ? 14 : -6), "ω=" + omega, {size: 9, colour});
      return [x(a), y(b)];
    });
    figure.line(means, colour, {dash: k});
  });
  figure.keys = t.modes.map(({mode}) => MODES[mode]);
  return h("figure", {}, keys(figure.keys), figure.element(), h("figcaption", {}, `Test accuracy vs. average path length, seeds: ${t.seeds}. Small marks are networks; large marks are the mean and standard deviation for one ω.`), figure.tools(`accuracy vs path length for ${t.label}`));
}
function coreShape(t) {
  const {layers, groups} = t.shape, row = 14, named = layers.length <= 40, left = named ? 170 : 4, width = room(600), panel = (width - left) / Math.max(1, groups.length), most = panel - 10;
  if (!layers.length) return "";
  const figure = new Figure(width, 40 + row * layers.length, `Nonlinear units in each layer of ${t.label}`);
  figure.rows = [["ω", "layer", "units", "fraction of nonlinear units"]];
  groups.forEach(([omega, shares, texts], g) => {
    const start = left + g * panel;
    figure.text(start + most / 2, 12, "ω = " + omega, {anchor: "middle", colour: "ink"}).text(start, figure.height - 4, "0", {size: 9}).text(start + most, figure.height - 4, "100 %", {anchor: "end", size: 9});
    shares.forEach((share, k) => {
      const y = 20 + row * k, bar = (w, fill) => figure.line([[start, y], [start + w, y], [start + w, y + row - 4], [start, y + row - 4]], fill, {fill, data: `${layers[k][0]}, ω ${omega}: ${texts[k]} of ${layers[k][1]} units`});
      bar(most, "rule");
      bar(most * share, "c0");
      figure.rows.push([omega, ...layers[k], share]);
    });
  });
  if (named) layers.forEach(([name, units], k) => figure.text(left - 6, 29 + row * k, `${short(name, 26)} (${units})`, {anchor: "end", size: 9}));
  return h("figure", {}, figure.element(), h("figcaption", {}, "The core network: fraction of each layer's units that are still nonlinear, averaged over seeds, for increasing ω. The input is at the top."), figure.tools(`core network of ${t.label}`));
}

/* ---- Where in the network: small multiples, and overlaid networks ---- */
const signatureAxis = (measure, from, to) => {
  const [low, high, log] = M[measure].axis, [least, greatest] = M[measure].bounds;
  const full = least !== null && greatest !== null && high - low > 0.25 * (greatest - least);
  return axis([low, high], from, to, full ? {low: Math.min(least < 0 ? low : least, low), high: Math.max(greatest, high), pad: 0} : {log});
};
const KINDCOLOURS = ["c0", "c1", "c2", "c3", "c4"];
function signature(cell, label, measure, width = 300, height = 126) {
  const names = places(cell), values = placeValues(cell), kinds = kindsOf(cell);
  const errors = halves(cell);
  const figure = new Figure(width, height, `${M[measure].name} of ${label}, site by site`);
  const named = width > 300 && names.length <= 40; // names don't fit into small multiples
  const left = named ? 60 : 38, right = width - 6, top = 6, bottom = height - (named ? 70 : 18);
  const y = signatureAxis(measure, bottom, top);
  const x = site => (names.length > 1 ? left + 6 + (right - left - 12) * site / (names.length - 1) : (left + right) / 2);
  frame(figure, null, y, left, top, right, bottom);
  if (named) names.forEach((name, site) => figure.text(x(site) + 4, bottom + 10, short(name, 16), {anchor: "end", size: 9, turn: -40}));
  else figure.text(left, height - 4, "input").text(right, height - 4, "output", {anchor: "end"});
  const [least, greatest] = M[measure].bounds;
  const within = (low, high) => [least === null ? low : Math.max(low, least), greatest === null ? high : Math.min(high, greatest)];
  let band = [];
  const flush = () => { if (band.length > 1) figure.line([...band.map(([a, , b]) => [a, b]), ...band.map(([a, b]) => [a, b]).reverse()], "c0", {fill: "c0", alpha: 0.16}); band = []; };
  names.forEach((_, site) => {
    if (Number.isFinite(values[site]) && errors[site] >= 0) band.push([x(site), ...within(values[site] - errors[site], values[site] + errors[site]).map(y)]);
    else flush();
  });
  flush();
  figure.line(gaps(names.map((_, site) => (Number.isFinite(values[site]) ? [x(site), y(values[site])] : null))), "quiet", {width: 0.9});
  const size = names.length > 90 ? 1.3 : names.length > 40 ? 1.9 : 2.6;
  figure.rows = [["site", "kind", M[measure].name, "half of the interval", "status"]];
  names.forEach((name, site) => {
    const kind = kinds.length ? kindIndex(kinds[site]) : 0;
    const fine = Number.isFinite(values[site]);
    figure.rows.push([name, kinds[site] || "", fine ? values[site] : NaN, Number.isFinite(errors[site]) ? errors[site] : NaN, fine ? "ok" : (remarkOf(cell, site) || [0, ""])[1]]);
    figure.mark(x(site), fine ? y(values[site]) : bottom, kind, fine ? KINDCOLOURS[kind] : "none", size, siteText(cell, site, measure), !fine);
  });
  return figure;
}
/* Merges consecutive nulls; a null interrupts the line at sites without a value. */
const gaps = points => points.filter((p, i) => p || (i && points[i - 1]));
/* The texts of the smallest and the largest of some values, whose numbers Python formatted. */
function rangeOf(values, texts) {
  const order = values.map((_, i) => i).filter(i => Number.isFinite(values[i])).sort((a, b) => values[a] - values[b]);
  const ends = order.length ? [order[0], order[order.length - 1]].map(i => texts[i].split(" ± ")[0]) : [];
  return ends.length && ends[0] !== ends[1] ? ends.join(" to ") : ends[0] || "no value";
}
const statisticsText = (cell, noun) => `${plural(places(cell).length, noun)} · ${rangeOf(placeValues(cell), placeTexts(cell))}`;
const watcher = "IntersectionObserver" in window ? new IntersectionObserver(entries => entries.forEach(entry => { if (entry.isIntersecting) { watcher.unobserve(entry.target); entry.target.draw(); } }), {rootMargin: "600px"}) : null;
function drawMulti() {
  const holder = $("#multi");
  if (!holder || !changed("multi", "strip", "q", "sort", "back", ...FACETS.map(([key]) => key))) return;
  const measure = measureIndex(state.strip);
  const over = new Set(list("over")), drawable = row => placeValues(rowCell(row, measure)).filter(Number.isFinite).length > 1;
  const rest = order.filter(row => visible(row) && !drawable(row));
  $("#multi-rest").textContent = rest.length ? `Fewer than two activations have a value by ${state.strip}: ${rest.map(row => ROWS[row].label).join("; ")}.` : "";
  holder.replaceChildren(...order.filter(row => visible(row) && drawable(row)).map(row => {
    const cell = rowCell(row, measure);
    const caption = h("figcaption", {}, h("button", {type: "button", "aria-pressed": String(over.has(ROWS[row].label)), title: "Overlay", onclick: () => toggleOver(ROWS[row].label)}, ROWS[row].label), h("span", {}, statisticsText(cell, M[measure].noun) + (cell.seeds ? ` · ${cell.seeds} seeds` : "")));
    const figure = h("figure", {"data-label": ROWS[row].label}, caption);
    figure.draw = () => { if (figure.children.length === 1) { const chart = signature(cell, ROWS[row].label, measure); figure.append(chart.element()); } };
    if (watcher) watcher.observe(figure); else figure.draw();
    return figure;
  }));
}
addEventListener("beforeprint", () => $$("#multi figure").slice(0, 120).forEach(figure => figure.draw && figure.draw()));
function toggleOver(label, scroll = false) {
  const over = list("over");
  setList("over", over.includes(label) ? over.filter(other => other !== label) : [...over, label].slice(-8));
  update();
  if (scroll && list("over").length) $("#over").scrollIntoView({block: "nearest"});
}
function drawOver() {
  const holder = $("#over");
  if (!holder || !changed("over", "over", "strip")) return;
  const over = list("over").map(label => ROWS.findIndex(row => row.label === label)).filter(row => row >= 0);
  $$("#multi [aria-pressed]").forEach(button => button.setAttribute("aria-pressed", String(list("over").includes(button.textContent))));
  holder.hidden = !over.length;
  if (!over.length) return;
  const measure = measureIndex(state.strip), width = room(920), height = 320;
  const figure = new Figure(width, height, `${M[measure].name} of ${over.map(row => ROWS[row].label).join(", ")} over relative depth`);
  const left = 54, right = width - 10, top = 8, bottom = height - 38;
  const y = signatureAxis(measure, bottom, top), x = axis([0, 1], left, right, {low: 0, high: 1});
  frame(figure, x, y, left, top, right, bottom, "relative depth: input 0, output 1", M[measure].name);
  figure.rows = [["network", "site", "relative depth", M[measure].name]];
  over.forEach((row, index) => {
    const cell = rowCell(row, measure), names = places(cell), values = placeValues(cell);
    const depth = site => (names.length > 1 ? site / (names.length - 1) : 0.5);
    figure.line(gaps(names.map((_, site) => (Number.isFinite(values[site]) ? [x(depth(site)), y(values[site])] : null))), "c" + index, {width: 1.5, dash: index});
    names.forEach((name, site) => {
      figure.rows.push([ROWS[row].label, name, depth(site), Number.isFinite(values[site]) ? values[site] : NaN]);
      if (Number.isFinite(values[site])) figure.mark(x(depth(site)), y(values[site]), index % 5, "c" + index, names.length > 60 ? 2 : 3.2, `${ROWS[row].label}, ${siteText(cell, site, measure)}`);
    });
  });
  figure.keys = over.map(row => ROWS[row].label);
  holder.replaceChildren(keys(figure.keys), figure.element(),
    h("div", {class: "bar"}, figure.tools("overlaid networks"), h("button", {type: "button", class: "linkish", onclick: () => { state.over = ""; update(); }}, "clear")));
}
function keys(labels) {
  return h("ul", {class: "keys"}, labels.map((label, index) => {
    const key = new Figure(30, 12, label);
    key.line([[0, 6], [30, 6]], "c" + index % 8, {width: 1.6, dash: index % 8}).mark(15, 6, index % 5, "c" + index % 8, 3);
    const item = h("li", {}, key.element(), label);
    item.firstChild.setAttribute("aria-hidden", "true");
    return item;
  }));
}

/* ---- Distances between signatures: heatmap with dendrogram ---- */
function drawMaps() {
  const holder = $("#maps");
  if (!holder || !changed("maps", "strip")) return;
  const comparison = D.maps[state.strip];
  holder.replaceChildren(comparison ? distanceFigure(comparison) : h("p", {class: "note"}, `Fewer than four networks have a signature by ${state.strip}.`));
}
const short = (text, most) => (text.length > most ? text.slice(0, Math.ceil(most / 2) - 1) + "…" + text.slice(-Math.floor(most / 2)) : text);
function distanceFigure(comparison) {
  const n = comparison.rows.length, order = comparison.order;
  const between = (i, j) => (i === j ? 0 : comparison.distances[Math.max(i, j)][Math.min(i, j)]);
  const most = Math.max(...comparison.distances.flat(), 1e-300);
  const labels = order.map(i => ROWS[comparison.rows[i]].label), size = Math.max(5, Math.min(26, 400 / n)), left = 150, tree = 70;
  const width = left + n * size + 8, height = tree + n * size + 20;
  const figure = new Figure(Math.max(width, 420), height, `Distances between signatures by ${state.strip}, with dendrogram`);
  figure.rows = [["network", ...labels]];
  labels.forEach((label, row) => {
    figure.rows.push([label, ...order.map(j => between(order[row], j))]);
    figure.text(left - 6, tree + row * size + size / 2 + 3.5, short(label, 26), {anchor: "end", size: Math.min(10, size * 0.95), colour: "ink"});
    order.forEach((j, column) => {
      const d = between(order[row], j), x = left + column * size, y = tree + row * size;
      figure.line([[x, y], [x + size - 0.6, y], [x + size - 0.6, y + size - 0.6], [x, y + size - 0.6]], "q", {fill: "q" + Math.min(9, Math.floor(10 * (1 - d / most))), data: row > column ? `${label} and ${labels[column]}: ${d}` : null});
    });
  });
  const at = order.map((leaf, place) => [leaf, place]).sort((p, q) => p[0] - q[0]).map(([, place]) => [left + place * size + size / 2, tree - 3]);
  const top = comparison.merges.length ? comparison.merges[comparison.merges.length - 1][2] : 1;
  for (const [a, b, d] of comparison.merges) {
    const y = tree - 3 - (top > 0 ? (tree - 14) * d / top : 0), [p, q] = [at[a], at[b]];
    figure.line([p, [p[0], y], [q[0], y], q], "quiet", {width: 0.9});
    at.push([(p[0] + q[0]) / 2, y]);
  }
  figure.text(left, height - 4, `${matchMedia("(prefers-color-scheme: dark)").matches ? "lighter" : "darker"} is closer; largest distance ${most}`);
  return h("figure", {}, h("figcaption", {}, h("b", {}, "Distances"), ` by ${state.strip}, average linkage`), figure.element(), figure.tools(`distances between signatures by ${state.strip}`));
}
/* ---- Agreement: scatter plots of any two measures ---- */
function drawAgreement() {
  const holder = $("#scatter");
  if (!holder) return;
  const heats = $$(".heats");
  if (!state.agree || !heats.some(heat => heat.dataset.kind === state.agree)) state.agree = START.agree = heats[0].dataset.kind;
  heats.forEach(heat => { heat.hidden = heat.dataset.kind !== state.agree; });
  $$("#agree-controls [data-agree]").forEach(button => button.setAttribute("aria-pressed", String(button.dataset.agree === state.agree)));
  if (!state.x || measureIndex(state.x) < 0) { const td = $(".heats:not([hidden]) [data-pair]"); const [a, b] = td.dataset.pair.split(",").map(Number); state.x = START.x = M[a].name; state.y = START.y = M[b].name; }
  const [a, b] = [measureIndex(state.x), Math.max(0, measureIndex(state.y))];
  const both = M[a].probe === M[b].probe && ["sites", "lines"].includes(M[a].probe);
  const byPlace = both && (state.by === "place" || state.by === "" && state.agree === "pearson");
  $$(".heats td.on").forEach(td => td.classList.remove("on"));
  $$(`.heats [data-pair="${a},${b}"], .heats [data-pair="${b},${a}"]`).forEach(td => td.classList.add("on"));
  if (!changed("scatter", "x", "y", "by", "agree", "q", ...FACETS.map(([key]) => key))) return;
  const points = [];
  ROWS.forEach((row, index) => {
    if (!visible(index)) return;
    if (!byPlace) {
      const [x, y] = [a, b].map(m => num(row.cells[m].value));
      if (Number.isFinite(x) && Number.isFinite(y)) points.push({x, y, label: row.label, group: index, tip: [a, b].map(m => `${M[m].name} ${valueText(row.cells[m])}`).join(", ")});
      return;
    }
    for (const subject of row.subjects) {
      const [one, other] = [cellOf(subject, a), cellOf(subject, b)];
      const otherPlaces = new Map(places(other).map((name, i) => [name, i])), values = [placeValues(one), placeValues(other)];
      places(one).forEach((name, i) => {
        const k = otherPlaces.get(name), [x, y] = [values[0][i], k === undefined ? NaN : values[1][k]];
        if (Number.isFinite(x) && Number.isFinite(y)) points.push({x, y, label: `${SUBJECTS[subject].label}, ${name}`, group: index, kind: kindsOf(one)[i], tip: `${M[a].name} ${placeTexts(one)[i]}, ${M[b].name} ${placeTexts(other)[k]}`});
      });
    }
  });
  holder.replaceChildren(h("figcaption", {}, h("b", {}, `${M[b].name} vs. ${M[a].name}`), ` · one mark per ${byPlace ? M[a].noun : "network"} · n ${points.length}`));
  if (!points.length) return void holder.append(h("p", {}, "There are no values of both measures."));
  const figure = scatter(points, M[a].name, M[b].name, byPlace);
  holder.append(figure.element(), figure.tools(`${M[b].name} vs ${M[a].name}`));
}
function scatter(points, xname, yname, small) {
  const width = room(560), height = Math.min(400, width * 0.85), left = 62, right = width - 12, top = 10, bottom = height - 42;
  const figure = new Figure(width, height, `${yname} vs. ${xname}`);
  const x = axis(points.map(p => p.x), left, right, {log: wide(points.map(p => p.x))}), y = axis(points.map(p => p.y), bottom, top, {log: wide(points.map(p => p.y))});
  for (const v of x.ticks) figure.line([[x(v), top], [x(v), bottom]], "rule");
  frame(figure, x, y, left, top, right, bottom, xname, yname);
  figure.rows = [["point", xname, yname]];
  const few = !small && points.length <= 14;
  const boxes = [];
  points.forEach(p => {
    figure.rows.push([p.label, p.x, p.y]);
    figure.mark(x(p.x), y(p.y), p.kind ? kindIndex(p.kind) : 0, small ? "c" + p.group % 8 : "c0", small ? 2.6 : 4, `${p.label}: ${p.tip}`);
    if (!few) return;
    const text = short(p.label, 34), wide = 5.4 * text.length;
    const end = x(p.x) + wide + 8 > right, at = [x(p.x) + (end ? -8 : 8), y(p.y) + 3.5];
    const from = end ? at[0] - wide : at[0];
    while (boxes.some(([a, b, line]) => a < from + wide && from < b && Math.abs(line - at[1]) < 11)) at[1] += 2;
    boxes.push([from, from + wide, at[1]]);
    figure.text(at[0], at[1], text, {anchor: end ? "end" : "start", size: 10, colour: "ink"});
  });
  return figure;
}

/* ---- Lines ---- */
const MAX_DRAWN = 8;
function pathsOf(row, measure) {
  return ROWS[row].subjects.flatMap(subject => { const cell = cellOf(subject, measure), values = placeValues(cell); return places(cell).map((name, i) => ({name: ROWS[row].subjects.length > 1 ? SUBJECTS[subject].seed + "/" + name : name, value: values[i]})).filter(p => Number.isFinite(p.value)); });
}
function drawLines() {
  const holder = $("#lines");
  if (!holder || !lineMeasures.length || !changed("lines", "line", "q", "sort", "back", ...FACETS.map(([key]) => key))) return;
  let measure = measureIndex(state.line);
  if (!lineMeasures.includes(measure)) measure = lineMeasures[0];
  $$("#lines-controls [data-line]").forEach(button => button.setAttribute("aria-pressed", String(+button.dataset.line === measure)));
  const m = M[measure];
  const along = order.filter(row => visible(row) && pathsOf(row, measure).length);
  const shown = along.slice(0, MAX_DRAWN);
  const ecdf = new Figure(room(560), 360, `Fraction of paths with ${m.name} at most x`);
  const all = shown.flatMap(row => pathsOf(row, measure).map(p => p.value));
  const [left, right, top, bottom] = [62, room(560) - 12, 10, 318];
  const x = axis(all, left, right, {log: wide(all)}), y = axis([0, 1], bottom, top, {low: 0, high: 1});
  frame(ecdf, x, y, left, top, right, bottom, m.name, "fraction of paths");
  ecdf.rows = [["network", "path", m.name]];
  shown.forEach((row, index) => {
    const networkPaths = pathsOf(row, measure);
    networkPaths.forEach(p => ecdf.rows.push([ROWS[row].label, p.name, p.value]));
    const values = networkPaths.map(p => p.value).sort((p, q) => p - q);
    const points = [];
    values.forEach((v, i) => points.push([x(v), y(i / values.length)], [x(v), y((i + 1) / values.length)]));
    ecdf.line(points, "c" + index, {width: 1.7, dash: index});
  });
  ecdf.keys = shown.map(row => `${ROWS[row].label} (${plural(pathsOf(row, measure).length, "path")})`);
  holder.replaceChildren(h("figure", {}, h("figcaption", {}, h("b", {}, `Distribution of ${m.name} over paths`), along.length > MAX_DRAWN ? ` · the first ${MAX_DRAWN} of ${along.length} networks shown` : ""), keys(ecdf.keys), ecdf.element(), ecdf.tools(`distribution of ${m.name}`)));
}

/* ---- One network ---- */
const fold = (title, ...parts) => h("details", {class: "fold"}, h("summary", {}, title), parts.flat());
/* A part of a network's panel: on a page of one network, where its values stand above, it is folded. */
const section = (title, ...parts) => (D.single ? fold(title, ...parts) : h("div", {}, h("h3", {}, title), parts.flat()));
function drawSubject() {
  const holder = $("#subject");
  if (!changed("subject", "subject", "strip")) return;
  let subject = SUBJECTS.findIndex(one => one.label === state.subject);
  const row = ROWS.findIndex(one => one.label === state.subject);
  if (subject < 0 && row >= 0) subject = ROWS[row].subjects[0];
  holder.hidden = subject < 0;
  if (subject < 0) return holder.replaceChildren();
  const one = SUBJECTS[subject];
  const whole = row >= 0 && ROWS[row].subjects.length > 1 && state.subject !== one.label ? row : -1;
  const label = whole >= 0 ? ROWS[row].label : one.label;
  const parts = D.single ? [] : [h("div", {class: "bar"}, h("h2", {style: "margin:0"}, label), h("button", {type: "button", class: "plain push", onclick: () => { state.subject = ""; update(); const line = lines[row >= 0 ? row : 0]; if (line) $("a", line).focus(); }}, "Close"))];
  const siblings = (ROWS.find(r => r.subjects.includes(subject)) || {subjects: []}).subjects.filter(s => whole >= 0 || s !== subject);
  if (siblings.length) parts.push(h("p", {class: "note"}, whole >= 0 ? `Mean of ${siblings.length} seeds: ` : "The same network: ", siblings.flatMap((s, i) => [i ? ", " : "", h("a", {href: "#subject=" + encodeURIComponent(SUBJECTS[s].label)}, "seed " + SUBJECTS[s].seed)])));
  if (one.remarks.length) parts.push(h("div", {class: "notice"}, one.remarks.slice(0, 8).map(text => h("div", {}, text))));
  const entries = ROWS[whole >= 0 ? whole : ROWS.findIndex(r => r.subjects.length === 1 && r.subjects[0] === subject)];
  const numbers = M.map((m, i) => {
    const single = cellOf(subject, i), mine = entries ? entries.cells[i] : {}, cell = whole >= 0 ? {...mine, v: valueText(mine), count: mine.n} : single;
    const value = num(whole >= 0 ? mine.value : (single.t || {}).value), fine = cell.s === "ok" && Number.isFinite(value);
    const record = h("button", {type: "button", class: "linkish", title: "Record", onclick: () => showRecord(whole >= 0 ? ROWS[whole].subjects : [subject], i, whole >= 0 ? describe(whole, i) : "")}, m.name);
    const number = text => h("td", {class: "number"}, text || "");
    return [h("th", {scope: "row"}, record), fine ? h("td", {class: "number", "data-v": whole >= 0 ? null : value}, cell.v) : h("td", {class: "missing"}, cell.s), number(mine.interval), number(mine.range), number(ROWS.length > 1 ? mine.ranks : ""),
      h("td", {class: "more"}, fine ? [cell.o, m.scale].filter(Boolean).join("; ") : cell.r || ""), number(cell.count), number(cell.sec), number(cell.pass)];
  });
  const filled = numbers[0].map((_, k) => numbers.some(cells => cells[k].textContent));
  const known = Object.entries(D.statistics).filter(([name]) => numbers.some(cells => cells[5].textContent.split(/[ ,]+/).includes(name)));
  const legend = known.length ? h("dl", {class: "note"}, known.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])) : null;
  parts.push(section("All numbers", h("div", {class: "wide", tabindex: "0"}, h("table", {class: "data"}, h("thead", {}, h("tr", {}, ["measure", "value", `${D.confidence} % interval`, "range", "rank", "other statistics", "n", "own time", "shared pass"].map((text, i) => (filled[i] ? h("th", {scope: "col", class: i && i !== 5 ? "number" : null}, text) : null)))), h("tbody", {}, numbers.map(cells => h("tr", {}, cells.filter((_, i) => filled[i])))))), legend));
  const measure = measureIndex(state.strip);
  if (measure >= 0 && places(cellOf(subject, measure)).length) {
    const drawn = whole >= 0 ? rowCell(row, measure) : cellOf(subject, measure);
    const figure = signature(drawn, label, measure, room(920), 260);
    const curve = [h("h3", {}, `${M[measure].name} at each activation${drawn.seeds ? `, mean of ${drawn.seeds} seeds` : ""}`), figure.element(), figure.tools(`signature of ${label}`)];
    const values = h("div", {class: "two"}, h("div", {}, h("h3", {}, "By module"), moduleTree(drawn)), h("div", {}, h("h3", {}, "All measures"), sitesTable(i => (whole >= 0 ? rowCell(row, i) : cellOf(subject, i)))));
    if (D.single) parts.push(fold("Each activation: curve, modules and all measures", curve, values));
    else parts.push(...curve, fold("The same values by module and in a table", values));
  }
  for (const i of M.keys()) parts.push(...coreNetwork(one.label, cellOf(subject, i), i), ...partsOf(one.label, cellOf(subject, i), i));
  const others = M.map((m, i) => i).filter(i => M[i].probe !== "sites" && places(cellOf(subject, i)).length > 1);
  for (const i of others) {
    const cell = cellOf(subject, i), stats = Object.keys(cell.c);
    parts.push(h("details", {}, h("summary", {}, `${M[i].name}: all ${plural(places(cell).length, M[i].noun)}`), h("div", {class: "wide", tabindex: "0"}, h("table", {class: "data"}, h("thead", {}, h("tr", {}, ["place", ...stats].map((text, k) => h("th", {scope: "col", class: k ? "number" : null}, text)))), h("tbody", {}, places(cell).map((name, k) => h("tr", {}, h("th", {scope: "row"}, name), stats.map((s, i) => h("td", {class: "number"}, s === "value" ? placeTexts(cell)[k] : ((cell.fs || [])[k] || [])[i] || ""))))))))) ;
  }
  if (one.drawing) parts[D.single ? "unshift" : "push"](...drawnPath(one));
  parts.push(section("Weights, data and preprocessing", h("dl", {}, Object.entries(one.facts).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {class: /hash/.test(name) ? "code" : null}, value)]))));
  holder.replaceChildren(...parts);
  if (drawnState.routed) holder.scrollIntoView({block: "start"}), holder.focus({preventScroll: true});
}
/* Draws one bar per row (name, value and an optional total, in grey). */
function bars(title, head, rows, label, scale = value => value) {
  const row = 15, left = 200, width = room(700);
  const figure = new Figure(width, 8 + row * rows.length, title);
  figure.rows = [head, ...rows];
  const most = Math.max(...rows.map(([, value, whole]) => whole ?? value)) || 1;
  rows.forEach(([name, value, whole], k) => {
    const top = 4 + row * k, end = v => left + (width - left - 110) * scale(v / most);
    const bar = (v, fill) => figure.line([[left, top], [end(v), top], [end(v), top + 11], [left, top + 11]], fill, {fill});
    if (whole !== undefined) bar(whole, "none");
    bar(value, "c0");
    figure.text(left - 6, top + 9.5, short(name, 34), {anchor: "end"}).text(end(whole ?? value) + 6, top + 9.5, label(name));
  });
  return [figure.element(), figure.tools(title)];
}
/* Draws the number of active units in each layer, out of all its units. */
function coreNetwork(label, cell, measure) {
  if (M[measure].probe !== "graph" || !cell.c || !cell.c.value || !cell.c.units) return [];
  const units = Object.keys(cell.c).indexOf("units"), names = places(cell);
  const rows = names.map((name, k) => [name, placeValues(cell)[k], num(cell.c.units[k])]);
  const wholes = rows.map(([, , all], k) => ((cell.fs || [])[k] || [])[units] || String(all));
  const texts = new Map(rows.map(([name, active, all], k) => [name, active === all ? wholes[k] : `${placeTexts(cell)[k]} of ${wholes[k]}`]));
  return [h("h3", {}, `Core network: ${M[measure].name}`), h("p", {class: "note"}, "Nonlinear units in each layer, out of all its units. The length of a bar is proportional to the square root of the number."), ...bars(`core network of ${label}`, ["layer", "active units", "units"], rows, name => texts.get(name), Math.sqrt)];
}
/* Draws the parts of a value by activation. */
function partsOf(label, cell, measure) {
  if (!cell.parts) return [];
  const {name} = M[measure], texts = new Map(cell.parts.map(([site, , text]) => [site, text])), parts = cell.parts.map(([site, value]) => [site, num(value)]);
  return [h("details", {}, h("summary", {}, `${name} by activation`), bars(`${name} of ${label} by activation`, ["site", name], parts, site => texts.get(site)))];
}
function sitesTable(cellBy) {
  const columns = siteMeasures.filter(i => places(cellBy(i)).length);
  const first = cellBy(columns[0]);
  const names = places(first), kinds = kindsOf(first);
  const siteMaps = columns.map(i => { const cell = cellBy(i), values = placeValues(cell); return new Map(places(cell).map((name, k) => [name, [values[k], remarkOf(cell, k), cell.seeds, placeTexts(cell)[k]]])); });
  return h("div", {class: "wide", style: "max-height:34rem;overflow:auto", tabindex: "0"}, h("table", {class: "data"}, h("thead", {}, h("tr", {}, h("th", {scope: "col"}, "site"), kinds.length ? h("th", {scope: "col"}, "kind") : null, columns.map(i => h("th", {scope: "col", class: "number"}, M[i].name)))),
    h("tbody", {}, names.map((name, k) => h("tr", {}, h("th", {scope: "row"}, name), kinds.length ? h("td", {}, kinds[k]) : null, siteMaps.map(map => { const [value, remark, seeds, text] = map.get(name) || []; return Number.isFinite(value) ? h("td", {class: "number", "data-v": seeds ? null : value}, text) : h("td", {class: "number missing", title: remark ? remark[2] : ""}, remark ? remark[1] : "–"); }))))));
}
function moduleTree(cell) {
  const values = placeValues(cell), texts = placeTexts(cell), colours = cell.l || "";
  const root = {children: new Map(), sites: []};
  places(cell).forEach((name, site) => {
    let node = root;
    for (const part of name.split(/[./]/)) {
      if (!node.children.has(part)) node.children.set(part, {children: new Map(), sites: []});
      node = node.children.get(part);
      node.sites.push(site);
    }
  });
  const write = (name, node) => {
    while (node.children.size === 1 && node.sites.length === [...node.children.values()][0].sites.length) { const [[next, child]] = node.children; name += "." + next; node = child; }
    const finite = node.sites.filter(site => Number.isFinite(values[site]));
    const middle = [...finite].sort((a, b) => values[a] - values[b])[Math.floor(finite.length / 2)];
    const swatch = h("i", {style: finite.length ? `background:var(--q${colours[middle]})` : "background:var(--none)"});
    const text = node.children.size ? rangeOf(finite.map(site => values[site]), finite.map(site => texts[site])) : finite.length ? texts[middle] : "no value";
    const line = h("span", {}, swatch, name, " ", h("span", {class: "note"}, text + (node.children.size ? ", " + plural(finite.length, "activation") : "")));
    if (!node.children.size) return h("li", {}, line);
    return h("li", {}, h("details", {open: node.sites.length < 40}, h("summary", {}, line), h("ul", {}, [...node.children].map(([part, child]) => write(part, child)))));
  };
  return h("ul", {class: "tree"}, [...root.children].map(([part, child]) => write(part, child)));
}
function drawnPath(one) {
  const drawing = one.drawing;
  try {
    const numbers = row => row.split(/\s+/).map(Number);
    const lengths = drawing.lengths, logits = drawing.logits, total = lengths.reduce((s, v) => s + v, 0) || 1;
    const bars = (drawing.breakpoints || []).map(numbers), row = bars.length > 24 ? 11 : 16;
    const width = room(920), narrow = width < 600, left = narrow ? 56 : 150, right = width - (narrow ? 34 : 70), panel = 120;
    const height = 10 + logits.length * (panel + 14) + (bars.length ? 26 + row * bars.length : 0) + 36;
    const figure = new Figure(width, height, `${drawing.place} of ${one.label}: logits along the path, with chords`);
    figure.rows = [["logit", "segment", "position in the segment", "network"]];
    const x = axis([0, total], left, right, {low: 0, high: total});
    let top = 10;
    logits.forEach((logit, k) => {
      const curves = drawing.curves.map(segment => numbers(segment[k])), y = axis(curves.flat(), top + panel, top);
      figure.text(narrow ? 10 : left - 62, top + panel / 2, "output " + logit, {anchor: narrow ? "middle" : "end", size: 11, colour: "ink", turn: narrow ? -90 : 0});
      for (const v of y.ticks) figure.line([[left, y(v)], [right, y(v)]], "rule").text(left - 6, y(v) + 3, tickText(v), {anchor: "end"});
      let begin = 0;
      curves.forEach((curve, segment) => {
        const at = i => x(begin + lengths[segment] * i / Math.max(1, curve.length - 1));
        const chord = i => curve[0] + (curve[curve.length - 1] - curve[0]) * i / Math.max(1, curve.length - 1);
        curve.forEach((v, i) => figure.rows.push([logit, segment, i / Math.max(1, curve.length - 1), v]));
        for (const [name, pick] of [["above", Math.max], ["below", Math.min]])
          figure.line([...curve.map((v, i) => [at(i), y(pick(v, chord(i)))]), ...curve.map((_, i) => [at(i), y(chord(i))]).reverse()], name, {fill: name, alpha: 0.75});
        figure.line([[at(0), y(curve[0])], [at(curve.length - 1), y(curve[curve.length - 1])]], "quiet", {dash: 1});
        figure.line(curve.map((v, i) => [at(i), y(v)]), "c0", {width: 1.3});
        begin += lengths[segment];
        if (segment < curves.length - 1) figure.line([[x(begin), top], [x(begin), top + panel]], "rule");
      });
      top += panel + 14;
    });
    if (bars.length) {
      figure.text(left, top + 12, "breakpoints at each site along the path; each row has its own scale", {size: 10});
      top += 22;
      bars.forEach((counts, k) => {
        const most = Math.max(1, ...counts), step = (right - left) / counts.length, name = drawing.sites[k];
        const points = [[left, top + row - 2]];
        counts.forEach((c, i) => points.push([left + i * step, top + row - 2 - (row - 4) * c / most], [left + (i + 1) * step, top + row - 2 - (row - 4) * c / most]));
        points.push([right, top + row - 2]);
        figure.line(points, "quiet", {fill: "quiet"}).text(left - 6, top + row - 4, short(name, narrow ? 12 : 24), {anchor: "end", size: narrow ? 7 : 9}).text(right + 6, top + row - 4, String(counts.reduce((s, v) => s + v, 0)), {size: 9});
        top += row;
      });
    }
    for (const v of x.ticks) figure.line([[x(v), top + 2], [x(v), top + 6]], "quiet").text(x(v), top + 17, tickText(v), {anchor: "middle"});
    figure.text((left + right) / 2, top + 31, `distance along ${drawing.place}, in input units`, {anchor: "middle", size: 11});
    const summary = bars.length ? `${plural(drawing.crossings, "breakpoint")}${drawing.method === "exact" ? "" : ` (${drawing.method})`}` : drawing.method.includes("refined") ? "with estimated, not located, boundaries" : "the network is not piecewise affine and has no breakpoints";
    return [h("h3", {}, "One path"), h("p", {class: "note"}, `${drawing.place}: ${plural(lengths.length, "segment")}, ${summary}. Solid lines: the network. Dashed lines: the chords. The shaded area is the absolute deviation.`), figure.element(), figure.tools(`path of ${one.label}`)];
  } catch { return [h("p", {class: "missing"}, "The path data in the record is damaged.")]; }
}

/* ---- Citing ---- */
function citing() {
  const bar = $("#cite-controls");
  if (!bar) return;
  const status = h("span", {class: "status", role: "status"});
  const act = (text, content) => h("button", {type: "button", class: "plain", onclick: async () => { await copy(content()); status.textContent = text + " copied"; }}, text);
  const bibtex = $("#bibtex");
  bar.append(act("Sentence", () => $("#cite-text").textContent), ...(bibtex ? [act("BibTeX", () => bibtex.textContent.trim() + "\n")] : []),
    act("Markdown", asMarkdown), ...($("#latex") ? [act("LaTeX", asLatex)] : []), act("Link", () => location.href), status);
}

/* ---- Controls ---- */
function menu(title, name, content, right = false) { return h("details", {class: "menu" + (right ? " right" : ""), "data-menu": name}, h("summary", {}, title), h("div", {}, content)); }
function segment(label, options, key, apply) {
  return h("span", {class: "seg", role: "group", "aria-label": label}, options.map(([value, text]) => h("button", {type: "button", "data-set": key, "data-value": value, "aria-pressed": "false", onclick: () => { state[key] = value; if (apply) apply(); update(); }}, text)));
}
function controls() {
  const bar = $("#controls");
  if (!bar) return;
  bar.append(
    h("input", {type: "search", id: "filter", placeholder: "Filter networks", "aria-label": "Filter networks", oninput: event => { state.q = event.target.value; update(); }}),
    ...FACETS.map(([key, values]) => menu(key[0].toUpperCase() + key.slice(1), key, values.map(value => h("label", {}, h("input", {type: "checkbox", value, "data-facet": key, onchange: () => { setList(key, $$(`[data-facet="${key}"]:checked`).map(box => box.value)); update(); }}), value)))),
    segment("Cell content", [["values", "Values"], ["ranks", "Ranks"]], "show"),
    h("button", {type: "button", class: "plain", id: "spread", "aria-pressed": "false", title: "Show ranges over places or seeds instead of errors and ranks", onclick: () => { state.spread = state.spread ? "" : "1"; update(); }}, "Range"),
    h("label", {class: "narrow"}, "measure", h("select", {id: "one", "aria-label": "Measure shown", onchange: event => { state.one = event.target.value; update(); }}, M.map(m => h("option", {value: m.name}, m.name)))),
    menu("Measures", "measures", M.map((m, i) => h("label", {}, h("input", {type: "checkbox", checked: true, "data-column-box": i, onchange: () => { setList("hide", M.filter((_, k) => !$(`[data-column-box="${k}"]`).checked).map(one => one.name)); update(); }}), m.name))),
    D.differences.length ? h("label", {}, "difference from", h("select", {id: "base", "aria-label": "Show differences from", onchange: event => { state.base = event.target.value; update(); }}, h("option", {value: ""}, "nothing"), ROWS.slice(0, D.differences.length).map(row => h("option", {value: row.label}, row.label)))) : null,
    h("span", {class: "status", id: "shown", role: "status"}),
    h("span", {class: "push"}, menu("Download", "download", [["this table (CSV)", () => download("leaderboard.csv", asCsv(), "text/csv")], ["all numbers, tidy (CSV)", () => download("scores.csv", tidy(), "text/csv")]].map(([text, act]) => h("button", {type: "button", onclick: act}, text)), true)));
  bar.hidden = false;
  board.parentNode.after(h("button", {type: "button", class: "linkish", id: "more", hidden: true, onclick: () => { state.all = "1"; update(); }}));
  $$("thead [data-column]", board).forEach(head => {
    const column = head.dataset.column, name = column === "name" ? "name" : M[+column].name;
    const small = $("small", head);
    const button = h("button", {type: "button", class: "order", onclick: () => { state.back = state.sort === name ? (state.back ? "" : "1") : ""; state.sort = name; update(); }}, head.firstChild.textContent.trim());
    head.replaceChildren(button, ...(small ? [small] : []));
    if (column !== "name") small.replaceChildren(h("a", {href: "#meanings", title: M[+column].description, "aria-label": `${small.textContent}: what ${name} means`, onclick: event => { event.preventDefault(); define(+column); }}, small.textContent));
  });
  ROWS.forEach((row, index) => {
    if (row.subjects.length < 2) return;
    const small = $("th small", lines[index]);
    small.replaceChildren(small.textContent.replace(/ ?·? ?\d+ seeds$/, ""), " ", h("button", {type: "button", class: "seeds", "aria-expanded": "false", onclick: () => { const open = list("open"); setList("open", open.includes(row.label) ? open.filter(o => o !== row.label) : [...open, row.label]); update(); }}, `${row.subjects.length} seeds`));
  });
  const where = $("#where-controls");
  if (where) where.append(h("span", {class: "status"}, "By"), segment("Measure of strips and signatures", siteMeasures.map(i => [M[i].name, M[i].name]), "strip"));
  const agree = $("#agree-controls");
  if (agree) {
    const kinds = $$(".heats").map(heat => heat.dataset.kind);
    agree.append(h("span", {class: "seg", role: "group", "aria-label": "Coefficient"}, kinds.map(kind => h("button", {type: "button", "data-agree": kind, "aria-pressed": "false", onclick: () => { state.agree = kind; state.by = ""; update(); }}, {spearman: "Spearman, networks", kendall: "Kendall, networks", pearson: "Pearson, activations"}[kind]))));
    const pick = key => h("select", {id: "pick-" + key, "aria-label": key === "x" ? "x axis" : "y axis", onchange: event => { state[key] = event.target.value; update(); }}, M.map(m => h("option", {value: m.name}, m.name)));
    agree.append(h("label", {}, "x axis", pick("x")), h("label", {}, "y axis", pick("y")), segment("Marks", [["network", "Networks"], ["place", "Activations or paths"]], "by"));
    $$(".heats td[data-pair]").forEach(td => {
      const choose = () => { const [a, b] = td.dataset.pair.split(",").map(Number); state.y = M[a].name; state.x = M[b].name; update(); };
      const inner = h("button", {type: "button", onclick: choose, "aria-label": td.title});
      inner.append(...td.childNodes);
      td.append(inner);
    });
  }
  const along = $("#lines-controls");
  if (along && lineMeasures.length) along.append(h("span", {class: "seg", role: "group", "aria-label": "Measure"}, lineMeasures.map(i => h("button", {type: "button", "data-line": i, "aria-pressed": "false", onclick: () => { state.line = M[i].name; update(); }}, M[i].name))));
  else if (along) along.closest("section").hidden = true;
}
function define(measure) {
  const holder = $("#meanings");
  if (!holder) return;
  holder.open = true;
  const target = $$("dt", holder).find(dt => dt.textContent === M[measure].name) || holder;
  target.scrollIntoView({block: "center"});
  target.focus({preventScroll: true});
}
function showControls() {
  const filter = $("#filter");
  if (!filter) return;
  if (filter.value !== state.q) filter.value = state.q;
  if ($("#base")) $("#base").value = state.base;
  $("#one").value = state.one;
  $("#spread").setAttribute("aria-pressed", String(!!state.spread));
  $$("[data-set]").forEach(button => button.setAttribute("aria-pressed", String(state[button.dataset.set] === button.dataset.value)));
  for (const [key] of FACETS) { const values = list(key); $$(`[data-facet="${key}"]`).forEach(box => { box.checked = values.includes(box.value); }); $(`[data-menu="${key}"] summary`).classList.toggle("on", values.length > 0); }
  const hidden = list("hide");
  M.forEach((m, i) => { $(`[data-column-box="${i}"]`).checked = !hidden.includes(m.name); });
  $(`[data-menu="measures"] summary`).classList.toggle("on", hidden.length > 0);
  for (const key of ["x", "y"]) { const pick = $("#pick-" + key); if (pick) pick.value = state[key]; }
}
document.addEventListener("click", event => { $$(".menu[open]").forEach(one => { if (!one.contains(event.target) || event.target.closest(".menu button")) one.open = false; }); });
document.addEventListener("keydown", event => {
  if (event.key !== "Escape") return;
  const open = $(".menu[open]");
  if (open) { open.open = false; $("summary", open).focus(); } else if (state.subject && !D.single) { state.subject = ""; update(); }
});

/* Draws the leaderboard immediately and the rest when the browser is idle. */
let later = 0;
function update() {
  drawBoard();
  showControls();
  drawSubject();
  writeHash();
  clearTimeout(later);
  later = setTimeout(drawRest, 0);
}
function drawRest() {
  drawCurves();
  drawTradeoffs();
  drawMulti();
  drawOver();
  drawMaps();
  drawAgreement();
  drawLines();
  showControls();
}
addEventListener("hashchange", () => {
  if (location.hash.slice(1) === written) return;
  const anchor = location.hash && !location.hash.includes("=");
  if (anchor) return;
  const before = state.subject;
  const link = location.hash.slice(1);
  if (/^subject=[^&]*$/.test(link)) { // a link within the page changes nothing else
    try { state.subject = decodeURIComponent(link.slice(8)); } catch { /* not ours */ }
  } else readHash();
  drawnState.routed = state.subject !== before;
  update();
  drawnState.routed = false;
});
readHash();
controls();
citing();
drawnState.routed = state.subject !== "" && !D.single;
update();
drawnState.routed = false;
