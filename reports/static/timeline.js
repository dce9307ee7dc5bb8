"use strict";
// The page of all ranks: holds the events, shows one iteration of them, and redraws what is in view.

const MOST_BARS = 6000; // more would make the page slow; beyond it short neighbours are drawn as one
const ROWS_AT_ONCE = 48;
const ROW_PIXELS = [22, 56]; // least and most
const MARGIN = 168; // pixels for the labels of ranks, as in the style sheet for the overview
const ROW_FOR_NUMBERS = 30; // pixels, from which a bar has room for the number of its micro-batch

const run = JSON.parse(document.getElementById("run").textContent);
const view = {
  iteration: run.open, // index
  times: null, // ns from and to of a zoom; null: the whole iteration
  rows: null, // first and last row of a zoom; null: from the first, as many as fit
  stage: "",
  node: "",
  dp: run.replica, // of many ranks, the slowest replica alone
  hidden: new Set(), // indices of names
};
let events;
let columns;
let shown; // what barsInView found for the drawing on the page
let waiting; // of an event of the iteration: nanoseconds, or null (waits.js)

const element = (id) => document.getElementById(id);
const ms = (ns) => (ns / 1e6).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
// Plotly reads a little HTML in its texts; names are shown as they are.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Ranks that pass the filters, from top to bottom.
function chosenRanks() {
  const passes = (rank) => ["stage", "node", "dp"].every((key) => view[key] === "" || String(rank[key]) === view[key]);
  return run.ranks.flatMap((rank, index) => (passes(rank) ? [index] : []));
}

// Bars within the range of times (ns) and rows, one list per name. Where there would be more than MOST_BARS, events of
// a rank and name that are shorter than a pixel and less than one apart become one bar; then with two pixels, and so on.
function barsInView(rows, [from, to], [top, bottom], pixel) {
  const rowOf = new Map(rows.map((rank, row) => [rank, row]));
  const origin = columns.iteration_start[view.iteration];
  const inView = [];
  const seen = new Set();
  let inIteration = 0;
  for (let at = events.from[view.iteration]; at < events.from[view.iteration + 1]; at++) {
    const i = events.order[at];
    const row = rowOf.get(events.rank[i]);
    if (row === undefined) continue;
    seen.add(row);
    if (view.hidden.has(events.name[i])) continue;
    inIteration++;
    const start = events.start[i] - origin;
    const end = events.end[i] - origin;
    if (end >= from && start <= to && row >= top - 0.5 && row <= bottom + 0.5) inView.push({ i, row, start, end, count: 1 });
  }
  let bars = inView;
  for (let gap = pixel; bars.length > MOST_BARS && gap < 2 * (to - from); gap *= 2) bars = merged(inView, gap);
  const byName = run.names.map(() => []);
  for (const bar of bars) byName[events.name[bar.i]].push(bar);
  return { byName, bars: bars.length, events: inView.length, inIteration, silent: rows.length - seen.size };
}

function merged(bars, gap) {
  const last = new Map();
  const result = [];
  for (const bar of bars) {
    const key = bar.row * run.names.length + events.name[bar.i];
    const before = last.get(key);
    if (before && bar.end - bar.start < gap && before.short && bar.start - before.end < gap) {
      before.end = Math.max(before.end, bar.end);
      before.count += bar.count;
    } else {
      const copy = { ...bar, short: bar.end - bar.start < gap };
      last.set(key, copy);
      result.push(copy);
    }
  }
  return result;
}

function hoverText(bar) {
  const i = bar.i;
  const rank = run.ranks[events.rank[i]];
  const name = plain(run.names[events.name[i]]);
  const times = `start ${ms(bar.start)} ms<br>duration ${ms(bar.end - bar.start)} ms`;
  const where =
    `rank ${events.rank[i]} · stage ${rank.stage} · data-parallel ${rank.dp}${rank.tp === null ? "" : ` · tensor-parallel ${rank.tp}`}<br>` +
    `node ${plain(rank.node)}${rank.host && rank.host !== rank.node ? ` (${plain(rank.host)})` : ""}<br>` +
    `iteration ${columns.iterations[view.iteration]}`;
  if (bar.count > 1) return `<b>${bar.count} × ${name}</b><br>${where}<br>${times} together; zoom in to see each`;
  const chunk = run.chunks > 1 ? ` · chunk ${events.chunk[i]}` : "";
  const microBatch = events.micro_batch[i] < 0 ? "" : ` · micro-batch ${events.micro_batch[i]}${chunk}`;
  const peer = events.peer[i] < 0 ? "" : `<br>peer rank ${events.peer[i]}`;
  const wait = waiting(i);
  const waited = wait === null ? "" : `<br>waiting ${ms(wait)} ms of it`;
  return `<b>${name}</b><br>${where}${microBatch}${peer}<br>${times}${waited}`;
}

// One trace of bars per name, in the order of the names, so that what lies inside another task is drawn over it.
function traces(byName, pixel, numbered) {
  const cached = new Map();
  return run.names.map((name, index) => {
    const style = taskStyle(name);
    const bars = byName[index];
    const colour = (bar) => {
      const key = events.micro_batch[bar.i];
      if (!cached.has(`${index} ${key}`)) cached.set(`${index} ${key}`, shade(name, key, run.micro_batches));
      return cached.get(`${index} ${key}`);
    };
    const number = (bar) => {
      const wide = events.micro_batch[bar.i] >= 0 && bar.count === 1 && bar.end - bar.start > 16 * pixel;
      return wide ? String(events.micro_batch[bar.i]) : "";
    };
    return {
      type: "bar",
      orientation: "h",
      base: bars.map((bar) => bar.start / 1e6),
      x: bars.map((bar) => (bar.end - bar.start) / 1e6),
      y: bars.map((bar) => bar.row + (style.top + style.bottom) / 2),
      width: style.bottom - style.top,
      marker: { color: bars.map(colour), line: { width: 0 } },
      hovertext: bars.map(hoverText),
      hoverinfo: "text",
      text: numbered && name.endsWith("-compute") ? bars.map(number) : undefined,
      textposition: numbered && name.endsWith("-compute") ? "inside" : "none",
      insidetextanchor: "middle",
      textangle: 0,
      textfont: { size: 10 },
    };
  });
}

function layout(rows, times, [top, bottom], height) {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const stage = (row) => run.ranks[rows[row]].stage;
  const across = { layer: "below", xref: "paper", x0: 0, x1: 1 };
  const bands = rows.flatMap((_, row) =>
    stage(row) % 2 ? [{ ...across, type: "rect", y0: row - 0.5, y1: row + 0.5, fillcolor: colour("--band"), line: { width: 0 } }] : [],
  );
  const borders = rows.flatMap((_, row) =>
    row && stage(row) !== stage(row - 1) ? [{ ...across, type: "line", y0: row - 0.5, y1: row - 0.5, line: { width: 1, color: colour("--border") } }] : [],
  );
  return {
    barmode: "overlay",
    bargap: 0,
    hovermode: "closest",
    dragmode: "zoom",
    height,
    margin: { l: MARGIN, r: 12, t: 28, b: 4 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
    hoverlabel: { align: "left", bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    showlegend: false,
    shapes: [...bands, ...borders],
    xaxis: { side: "top", range: times.map((ns) => ns / 1e6), ticksuffix: " ms", gridcolor: colour("--line"), zeroline: false },
    yaxis: {
      range: [bottom + 0.5, top - 0.5],
      fixedrange: rows.length <= ROWS_AT_ONCE,
      tickvals: rows.map((_, row) => row),
      ticktext: rows.map((rank) => run.ranks[rank].label),
      ticks: "outside",
      ticklen: 6,
      tickcolor: "rgba(0,0,0,0)",
      showgrid: false,
      zeroline: false,
    },
  };
}

async function draw() {
  const rows = chosenRanks();
  const atOnce = Math.max(Math.min(rows.length, ROWS_AT_ONCE), 1);
  const times = view.times ?? [0, columns.iteration_length[view.iteration]];
  const visible = view.rows ?? [0, atOnce - 1];
  const rowPixels = Math.min(Math.max((innerHeight - 340) / atOnce, ROW_PIXELS[0]), ROW_PIXELS[1]);
  const width = element("timeline").clientWidth;
  const pixel = (times[1] - times[0]) / Math.max(width - MARGIN, 200);
  shown = barsInView(rows, times, visible, pixel);
  waiting = waits(events, run.names, run.ranks, events.from[view.iteration], events.from[view.iteration + 1]);
  const numbered = rowPixels >= ROW_FOR_NUMBERS;
  await Plotly.react("timeline", traces(shown.byName, pixel, numbered), layout(rows, times, visible, 32 + rowPixels * atOnce), {
    displaylogo: false,
    responsive: true,
    doubleClick: "autosize",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "resetScale2d"],
  });
  updateLegend();
  drawOverview(rows, columns, element("map").value);
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
  if (shown.bars < shown.events) parts.push(`drawn as ${shown.bars.toLocaleString("en")} bars; zoom in to see each`);
  if (shown.silent) parts.push(`${shown.silent} of ${rows} ranks have no events in it`);
  const ranks = Math.round(Math.min(bottom, rows - 1) - Math.max(top, 0)) + 1;
  if (ranks < rows) parts.push(`${ranks} of ${rows} ranks in view; drag with Shift for the others, or filter`);
  const apart = `clocks of ranks agree within ${(run.uncertainty_ns / 1e3).toLocaleString("en")} µs`;
  parts.push(run.uncertainty_ns ? apart : "all ranks on one clock");
  element("said").textContent = parts.join(" · ");
  element("iteration").value = number;
  element("previous").disabled = view.iteration === 0;
  element("next").disabled = view.iteration === columns.iterations.length - 1;
}

function show(iteration) {
  view.iteration = Math.min(Math.max(iteration, 0), columns.iterations.length - 1);
  view.times = null;
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
  events = assemble(columns, columns.iterations);
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
