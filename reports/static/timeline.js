"use strict";
// The page of all ranks: holds the events, shows one iteration of them, and redraws what is in view.

const run = JSON.parse(document.getElementById("run").textContent);
const KEPT = `iteration of ${location.pathname}`;
const refreshes = document.querySelector('meta[http-equiv="refresh"]') !== null; // while the run goes on
const kept = refreshes ? sessionStorage.getItem(KEPT) : null; // chosen before the page loaded itself anew
const view = {
  iteration: kept === null ? run.open : Number(kept), // index
  times: null, // ns from and to of a zoom; null: the whole iteration
  rows: null, // first and last row of a zoom; null: from the first, as many as fit
  stage: "",
  node: "",
  dp: run.replica, // of many ranks, the slowest replica alone
  hidden: new Set(), // indices of names
  predicted: run.predicted_ns > 0 && location.hash === "#predicted",
  path: false, // whether the critical path is drawn
};
let events;
let columns;
let shown; // what barsInView found for the drawing on the page

// Ranks that pass the filters, from top to bottom.
function chosenRanks() {
  const passes = (rank) => ["stage", "node", "dp"].every((key) => view[key] === "" || String(rank[key]) === view[key]);
  return run.ranks.flatMap((rank, index) => (passes(rank) ? [index] : []));
}

// What the rows show, from top to bottom: a rank, or run.ranks.length and a stage for what was predicted of it, which
// lies under the ranks of that stage.
function rowsOf(ranks) {
  if (!view.predicted) return ranks;
  const last = (index) => run.ranks[ranks[index]].stage !== run.ranks[ranks[index + 1]]?.stage;
  return ranks.flatMap((rank, index) => (last(index) ? [rank, run.ranks.length + run.ranks[rank].stage] : [rank]));
}

const isPredicted = (row) => row >= run.ranks.length;
const stageOf = (row) => (isPredicted(row) ? row - run.ranks.length : run.ranks[row].stage);
const labelOf = (row) => (isPredicted(row) ? `predicted · stage ${stageOf(row)}` : run.ranks[row].label);
const look = (row) => ({ label: labelOf(row), stage: stageOf(row), predicted: isPredicted(row) });

// Bars within the range of times (ns) and rows.
function barsInView(rows, [from, to], [top, bottom], pixel) {
  const rowOf = new Map(rows.map((rank, row) => [rank, row]));
  const origin = columns.iteration_start[view.iteration];
  const inView = [];
  const seen = new Set();
  let inIteration = 0;
  const see = (i, origin) => {
    const row = rowOf.get(events.rank[i]);
    if (row === undefined) return;
    seen.add(row);
    if (view.hidden.has(events.name[i])) return;
    if (!isPredicted(events.rank[i])) inIteration++;
    const start = events.start[i] - origin;
    const end = events.end[i] - origin;
    if (end >= from && start <= to && row >= top - 0.5 && row <= bottom + 0.5) inView.push({ i, row, start, end, wait: events.waiting[i], count: 1 });
  };
  for (let at = events.from[view.iteration]; at < events.from[view.iteration + 1]; at++) see(events.order[at], origin);
  for (let i = events.measured; view.predicted && i < events.rank.length; i++) see(i, 0);
  const bars = fewer(inView, pixel, to - from);
  const ofTheRun = inView.filter((bar) => bar.i < events.measured).length;
  return { bars, drawn: inView.length, events: ofTheRun, inIteration, silent: rows.length - seen.size };
}

function hoverText(bar) {
  const i = bar.i;
  const predicted = isPredicted(events.rank[i]);
  const rank = run.ranks[events.rank[i]];
  const name = plain(run.names[events.name[i]]);
  const times = `start ${ms(bar.start)} ms<br>duration ${ms(bar.end - bar.start)} ms`;
  const where = predicted
    ? `stage ${stageOf(events.rank[i])}, predicted`
    : `rank ${events.rank[i]} · stage ${rank.stage} · data-parallel ${rank.dp}${rank.tp === null ? "" : ` · tensor-parallel ${rank.tp}`}<br>` +
    `node ${plain(rank.node)}${rank.host && rank.host !== rank.node ? ` (${plain(rank.host)})` : ""}<br>` +
    `iteration ${columns.iterations[view.iteration]}`;
  if (bar.count > 1) return `<b>${bar.count} × ${name}</b><br>${where}<br>${times} together; zoom in to see each`;
  const chunk = run.chunks > 1 ? ` · chunk ${events.chunk[i]}` : "";
  const microBatch = events.micro_batch[i] < 0 ? "" : ` · micro-batch ${events.micro_batch[i]}${chunk}`;
  const peer = events.peer[i] < 0 ? "" : `<br>peer rank ${events.peer[i]}`;
  const waited = bar.wait < 0 ? "" : `<br>waiting ${ms(bar.wait)} ms of it`;
  return `<b>${name}</b><br>${where}${microBatch}${peer}<br>${times}${waited}`;
}

async function draw() {
  const ranks = chosenRanks();
  const rows = rowsOf(ranks);
  const atOnce = Math.max(Math.min(rows.length, ROWS_AT_ONCE), 1);
  const times = view.times ?? [0, Math.max(columns.iteration_length[view.iteration], view.predicted ? run.predicted_ns : 0)];
  const visible = view.rows ?? [0, atOnce - 1];
  const rowPixels = Math.min(Math.max((innerHeight - 340) / atOnce, ROW_PIXELS[0]), ROW_PIXELS[1]);
  const width = element("timeline").clientWidth;
  const pixel = (times[1] - times[0]) / Math.max(width - MARGIN, 200);
  shown = barsInView(rows, times, visible, pixel);
  const numbered = rowPixels >= ROW_FOR_NUMBERS;
  const bars = [...traces(shown.bars, pixel, numbered, hoverText), ...pathTraces(rows, pixel)];
  await Plotly.react("timeline", bars, layout(rows.map(look), times, visible, 32 + rowPixels * atOnce), CONFIG);
  updateLegend();
  drawOverview(ranks, columns, element("map").value);
  markIteration(view.iteration, columns.iterations.length);
  say(rows.length, visible);
}

function say(rows, [top, bottom]) {
  const number = columns.iterations[view.iteration];
  const parts = [
    `iteration ${number} of ${columns.iterations.at(-1)}`,
    `${ms(columns.iteration_length[view.iteration])} ms from first to last event`,
    `${shown.inIteration.toLocaleString("en")} events`,
  ];
  if (shown.events < shown.inIteration) parts.push(`${shown.events.toLocaleString("en")} in view`);
  if (shown.bars.length < shown.drawn) parts.push(`drawn as ${shown.bars.length.toLocaleString("en")} bars; zoom in to see each`);
  if (shown.silent) parts.push(`${shown.silent} of ${rows} rows have no events in it`);
  const ranks = Math.round(Math.min(bottom, rows - 1) - Math.max(top, 0)) + 1;
  if (ranks < rows) parts.push(`${ranks} of ${rows} rows in view; drag with Shift for the others, or filter`);
  if (view.predicted) parts.push(`predicted: ${ms(run.predicted_ns)} ms from one iteration to the next`);
  const apart = `clocks of ranks agree within ${(run.uncertainty_ns / 1e3).toLocaleString("en")} µs`;
  const unknown = run.uncertainty_ns === null ? "how well the clocks of nodes agree is not known" : "all ranks on one clock";
  parts.push(run.uncertainty_ns ? apart : unknown);
  element("said").textContent = parts.join(" · ");
  element("iteration").value = number;
  element("previous").disabled = view.iteration === 0;
  element("next").disabled = view.iteration === columns.iterations.length - 1;
}

function show(iteration) {
  view.iteration = Math.min(Math.max(iteration, 0), columns.iterations.length - 1);
  view.times = null;
  if (refreshes) sessionStorage.setItem(KEPT, view.iteration);
  return draw();
}

// After a zoom: draw what came into view, with as much detail as fits it.
function zoomed(change) {
  if (!Object.keys(change).some((key) => /^[xy]axis\.(range|autorange)/.test(key))) return;
  const { xaxis, yaxis } = element("timeline").layout;
  view.times = change["xaxis.autorange"] ? null : xaxis.range.map((time) => time * 1e6);
  view.rows = change["yaxis.autorange"] || yaxis.fixedrange ? null : [yaxis.range[1] + 0.5, yaxis.range[0] - 0.5];
  draw();
}

// A button per task, under the lane it is in; a click hides or shows it.
function makeLegend() {
  const lanes = Map.groupBy(run.names.keys(), (name) => taskStyle(run.names[name]).lane);
  const groups = LANES.filter((lane) => lanes.has(lane)).map((lane) => {
    const group = document.createElement("fieldset");
    const title = document.createElement("legend");
    title.textContent = lane;
    group.append(title, ...lanes.get(lane).map(legendEntry));
    return group;
  });
  element("legend").replaceChildren(...groups);
}

function legendEntry(name) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = run.names[name];
  button.value = name;
  button.addEventListener("click", () => {
    if (!view.hidden.delete(name)) view.hidden.add(name);
    draw();
  });
  return button;
}

function updateLegend() {
  for (const button of element("legend").querySelectorAll("button")) {
    const name = Number(button.value);
    button.setAttribute("aria-pressed", !view.hidden.has(name));
    button.style.setProperty("--task", shade(run.names[name], -1, 0));
  }
}

function fillFilter(key) {
  const values = key === "dp" ? run.replicas.map(String) : [...new Set(run.ranks.map((rank) => String(rank[key])))];
  const label = (value, index) => (key === "dp" && index === 0 && values.length > 1 ? `${value} (slowest)` : value);
  element(key).replaceChildren(new Option("all", ""), ...values.map((value, index) => new Option(label(value, index), value)));
  element(key).value = view[key];
  element(key).addEventListener("change", () => {
    view[key] = element(key).value;
    view.rows = null;
    draw();
  });
}

async function main() {
  columns = await unpack(element("columns").textContent, run.layout);
  view.iteration = Math.min(view.iteration, columns.iterations.length - 1);
  events = assemble(columns, columns.iterations, run.ranks.length);
  ["stage", "node", "dp"].forEach(fillFilter);
  makeLegend();
  element("iteration").min = columns.iterations[0];
  element("iteration").max = columns.iterations.at(-1);
  element("iteration").addEventListener("change", () => {
    const wanted = Number(element("iteration").value);
    const index = columns.iterations.findIndex((number) => number >= wanted);
    show(index < 0 ? columns.iterations.length - 1 : index);
  });
  element("previous").addEventListener("click", () => show(view.iteration - 1));
  element("next").addEventListener("click", () => show(view.iteration + 1));
  element("with-predicted").checked = view.predicted;
  element("with-predicted").disabled = !run.predicted_ns;
  element("with-predicted").addEventListener("change", () => {
    view.predicted = element("with-predicted").checked;
    view.times = view.rows = null;
    draw();
  });
  makePathBox();
  element("controls").addEventListener("submit", (event) => event.preventDefault());
  await draw();
  element("timeline").on("plotly_relayout", zoomed);
  element("overview").addEventListener("click", (event) => show(overviewCell(event, chosenRanks().length, columns.iterations.length)[1]));
  element("overview").addEventListener("mousemove", (event) => {
    const rows = chosenRanks();
    if (!rows.length) return;
    const [row, column] = overviewCell(event, rows.length, columns.iterations.length);
    const text = cellText(rows[row], column, columns);
    element("overview-cell").textContent = `${run.ranks[rows[row]].label} · iteration ${columns.iterations[column]}: ${text}`;
  });
  element("map").addEventListener("change", () => drawOverview(chosenRanks(), columns, element("map").value));
  darkScheme.addEventListener("change", () => draw());
  document.body.dataset.ready = "yes";
}

main().catch((error) => {
  element("said").textContent = `The timeline cannot be drawn: ${error.message}. It needs Chrome 117, Firefox 119, Safari 17.4 or newer.`;
  throw error;
});
