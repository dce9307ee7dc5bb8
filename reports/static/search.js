"use strict";
// The page of a search: shows one plan at a time, the one that the address names, and draws its predicted iteration.

const run = JSON.parse(document.getElementById("search").textContent);
const sections = Array.from(document.querySelectorAll("section.plan"));
let events;
let times = null; // ns from and to of a zoom; null: the whole iteration

const chosen = () => Math.max(sections.findIndex((section) => `#${section.id}` === location.hash), 0);

function hoverText(bar) {
  const i = bar.i;
  const name = plain(run.names[events.name[i]]);
  const spent = `start ${ms(bar.start)} ms<br>duration ${ms(bar.end - bar.start)} ms`;
  const where = `stage ${events.stage[i]}`;
  if (bar.count > 1) return `<b>${bar.count} × ${name}</b><br>${where}<br>${spent} together; zoom in to see each`;
  const chunk = run.plans[chosen()].chunks > 1 ? ` · chunk ${events.chunk[i]}` : "";
  const microBatch = events.micro_batch[i] < 0 ? "" : ` · micro-batch ${events.micro_batch[i]}${chunk}`;
  return `<b>${name}</b><br>${where}${microBatch}<br>${spent}`;
}

async function draw() {
  const number = chosen();
  const plan = run.plans[number];
  sections.forEach((section, index) => (section.hidden = index !== number));
  document.querySelectorAll("tr[data-plan]").forEach((row) => row.classList.toggle("chosen", Number(row.dataset.plan) === number));
  run.micro_batches = plan.micro_batches;
  const [from, to] = times ?? [0, plan.length_ns];
  const target = sections[number].querySelector(".iteration");
  const rowPixels = Math.min(Math.max(600 / plan.stages, ROW_PIXELS[0]), ROW_PIXELS[1]);
  const pixel = (to - from) / Math.max(target.clientWidth - MARGIN, 200);
  const first = run.plans.slice(0, number).reduce((sum, other) => sum + other.events, 0);
  const inView = [];
  for (let i = first; i < first + plan.events; i++) {
    const bar = { i, row: events.stage[i], start: events.start[i], end: events.start[i] + events.duration[i], wait: events.waiting[i], count: 1 };
    if (bar.end >= from && bar.start <= to) inView.push(bar);
  }
  const rows = Array.from({ length: plan.stages }, (_, stage) => ({ label: plan.labels[stage], stage, predicted: false }));
  const drawn = traces(fewer(inView, pixel, to - from), pixel, rowPixels >= ROW_FOR_NUMBERS, hoverText);
  const shape = layout(rows, [from, to], [0, plan.stages - 1], 32 + rowPixels * plan.stages);
  shape.yaxis.fixedrange = true;
  const fresh = !target.data;
  await Plotly.react(target, drawn, shape, CONFIG);
  if (fresh) target.on("plotly_relayout", (change) => zoomed(change, target));
  // What was drawn while its section was hidden had no width.
  sections[number].querySelectorAll("div.plot").forEach((place) => place.data && Plotly.Plots.resize(place));
}

function zoomed(change, target) {
  if (!Object.keys(change).some((key) => /^xaxis\.(range|autorange)/.test(key))) return;
  times = change["xaxis.autorange"] ? null : target.layout.xaxis.range.map((time) => time * 1e6);
  draw();
}

function makeLegend() {
  const entries = run.names.map((name) => Object.assign(document.createElement("span"), { className: "task", textContent: name }));
  entries.forEach((entry, name) => entry.style.setProperty("--task", shade(run.names[name], -1, 0)));
  element("legend").replaceChildren(...entries);
}

async function main() {
  const columns = await unpack(element("columns").textContent, run.layout);
  events = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name.replace("predicted_", ""), column]));
  makeLegend();
  await draw();
  addEventListener("hashchange", () => {
    times = null;
    draw();
  });
  darkScheme.addEventListener("change", () => {
    makeLegend();
    draw();
  });
  document.body.dataset.ready = "yes";
}

main();
