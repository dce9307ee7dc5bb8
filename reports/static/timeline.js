"use strict";
// The page of all ranks: holds the events and shows one iteration of them. shown.js says which events those are, rows.js
// which ranks have a row; address.js keeps what is shown in the address.

const run = JSON.parse(element("run").textContent);
const view = {
  iteration: run.open, // index
  stage: "",
  node: "",
  dp: "",
  unfolded: new Set(), // stages all of whose ranks are shown
  asked: new Set(), // ranks that are shown though they are like others and their stage is folded
  hidden: new Set(), // indices of names
  predicted: false,
  path: false, // whether the critical path is drawn
};
let events;
let columns;
let slices; // of the iteration, by rank: where its events begin and end in events.order
let messages; // of the iteration, as pairs of events; null until they are asked for
const chart = new Chart(element("timeline"), {
  names: run.names,
  microBatches: run.micro_batches,
  find,
  at,
  tip,
  neighbour,
  toggle,
  links: () => (messages ??= paired()),
  changed: writeHashSoon,
  said: say,
});

function draw() {
  slices = sliced();
  messages = null;
  chart.rows = makeRows();
  chart.rowOf = new Map(chart.rows.flatMap((row, index) => (row.fold ? [] : [[row.rank, index]])));
  chart.foldOf = new Map(chart.rows.flatMap((row, index) => (row.fold ? [[row.stage, index]] : [])));
  if (chart.selected !== null && !chart.rowOf.has(events.rank[chart.selected])) chart.selected = null;
  chart.length = Math.max(columns.iteration_length[view.iteration], view.predicted ? run.predicted_ns : 0, 1);
  updateLegend();
  drawOverview(chosenRanks(), columns, element("map").value);
  markIteration(view.iteration, columns.iterations.length);
  updateFoldButton();
  writeHash(); // at once, for the page of a run that goes on may load itself anew
  writeHashSoon(); // with the rows that are then in view
  chart.redraw();
}

function say() {
  const number = columns.iterations[view.iteration];
  const rows = chart.rows.filter((row) => !row.fold);
  let inIteration = 0;
  for (const { rank, predicted } of rows) if (!predicted) ofRank(rank, (i) => view.hidden.has(events.name[i]) || inIteration++);
  const inView = chart.shown.bars.reduce((sum, bar) => sum + (bar.i < events.measured && !bar.beside ? bar.count : 0), 0);
  const folded = chosenRanks().length - rows.filter((row) => !row.predicted).length;
  const silent = rows.filter((row) => !row.predicted && !slices.has(row.rank)).length;
  const seen = chart.shown.visible.length;
  const parts = [
    `iteration ${number} of ${columns.iterations.at(-1)}`,
    `${ms(columns.iteration_length[view.iteration])} ms from first to last event`,
    `${inIteration.toLocaleString("en")} events`,
  ];
  parts.push(...endText());
  if (inView < inIteration) parts.push(`${inView.toLocaleString("en")} in view`);
  if (chart.shown.bars.length < chart.shown.found) parts.push(`drawn as ${chart.shown.bars.length.toLocaleString("en")} bars; zoom in to see each`);
  if (folded) parts.push(`${howMany(folded)} folded: compute time within ${run.alike_percent}% and bubble within ${run.alike_percent} points of a rank shown`);
  if (silent) parts.push(`${silent} of ${rows.length} rows have no events in it`);
  if (seen < chart.rows.length) parts.push(`${seen} of ${chart.rows.length} rows in view; scroll for the others`);
  if (chart.shown.bars.some((bar) => bar.beside)) parts.push("pale: other iterations at the same time");
  if (view.predicted) parts.push(`predicted: ${ms(run.predicted_ns)} ms from one iteration to the next`);
  const apart = `rank clocks agree within ${(run.uncertainty_ns / 1e3).toLocaleString("en")} µs`;
  const unknown = run.uncertainty_ns === null ? "clock offset between nodes unknown" : "all ranks on one clock";
  parts.push(run.uncertainty_ns ? apart : unknown);
  const text = parts.join(" · ");
  if (element("said").textContent !== text) element("said").textContent = text;
  showTotals();
  element("iteration").value = number;
  element("previous").disabled = view.iteration === 0;
  element("next").disabled = view.iteration === columns.iterations.length - 1;
}

function show(iteration) {
  view.iteration = clamp(iteration, 0, columns.iterations.length - 1);
  chart.times = chart.selected = chart.ruler = null;
  draw();
}

// Of an iteration by its number, or the next one that there is.
function indexOf(number) {
  const index = columns.iterations.findIndex((one) => one >= number);
  return index < 0 ? columns.iterations.length - 1 : index;
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
  element("legend").replaceChildren(...groups, waitingEntry());
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
  element(key).addEventListener("change", () => {
    view[key] = element(key).value;
    draw();
  });
}

// A click on the map opens an iteration, and shows the rank that it hit.
function openCell(event) {
  const ranks = chosenRanks();
  const [row, column] = overviewCell(event, ranks.length, columns.iterations.length);
  const rank = ranks[row];
  if (rank !== undefined && isFolded(rank)) view.asked.add(rank);
  show(column);
  chart.draw();
  if (rank !== undefined) chart.uncover(chart.rowOf.get(rank));
}

async function main() {
  columns = await unpack(element("columns").textContent, run.layout);
  events = assemble(columns, columns.iterations, run.ranks.length);
  chart.what.events = events;
  ["stage", "node", "dp"].forEach(fillFilter);
  makeLegend();
  element("iteration").min = columns.iterations[0];
  element("iteration").max = columns.iterations.at(-1);
  element("iteration").addEventListener("change", () => show(indexOf(Number(element("iteration").value))));
  element("previous").addEventListener("click", () => show(view.iteration - 1));
  element("next").addEventListener("click", () => show(view.iteration + 1));
  element("with-predicted").disabled = !run.predicted_ns;
  element("with-predicted").addEventListener("change", () => {
    view.predicted = element("with-predicted").checked;
    chart.times = null;
    draw();
  });
  element("fold").addEventListener("click", toggleAll);
  makePathBox();
  chart.overlays.push(drawEnd);
  makeFind();
  chart.tool("Measure", "Measure what is in view, or end the measurement", () => chart.measureView());
  element("controls").addEventListener("submit", (event) => event.preventDefault());
  element("overview").addEventListener("click", openCell);
  element("overview").addEventListener("mousemove", (event) => {
    const rows = chosenRanks();
    if (!rows.length) return;
    const [row, column] = overviewCell(event, rows.length, columns.iterations.length);
    const text = cellText(rows[row], column, columns);
    element("overview-cell").textContent = `${run.ranks[rows[row]].label} · iteration ${columns.iterations[column]}: ${text}`;
  });
  element("map").addEventListener("change", draw);
  darkScheme.addEventListener("change", draw);
  addEventListener("hashchange", restore);
  restore();
  document.body.dataset.ready = "yes";
}

drawings.push(main());
drawings.at(-1).catch((error) => {
  element("said").textContent = `The timeline cannot be drawn: ${error.message}. It needs Chrome 117, Firefox 119 or Safari 17.4, or newer.`;
  throw error;
});
