"use strict";
// The page of a search: shows one plan at a time, the one that the address names, and draws its predicted iteration.

const run = JSON.parse(element("search").textContent);
const sections = Array.from(document.querySelectorAll("section.plan"));
const charts = new Map(); // by the number of the plan
let events;

const chosen = () => Math.max(sections.findIndex((section) => `#${section.id}` === location.hash), 0);

function chartOf(number) {
  const plan = run.plans[number];
  const first = run.plans.slice(0, number).reduce((sum, other) => sum + other.events, 0);
  const rows = plan.labels.map((label, stage) => ({ label, stage }));
  return iterationChart(sections[number].querySelector(".iteration"), run.names, events, { ...plan, first, rows });
}

function draw() {
  const number = chosen();
  sections.forEach((section, index) => (section.hidden = index !== number));
  document.querySelectorAll("tr[data-plan]").forEach((row) => row.classList.toggle("chosen", Number(row.dataset.plan) === number));
  if (!charts.has(number)) charts.set(number, chartOf(number));
  charts.get(number).draw();
  // What was drawn while its section was hidden had no width.
  sections[number].querySelectorAll("div.plot").forEach((place) => place.data && Plotly.Plots.resize(place));
}

// A section that was hidden when its link was followed is not in view yet.
function show() {
  draw();
  const section = sections[chosen()];
  section.tabIndex = -1;
  section.focus({ preventScroll: true });
  section.scrollIntoView();
}

async function main() {
  events = columnsOf(await unpack(element("columns").textContent, run.layout));
  const drawAll = () => {
    plainLegend(run.names);
    draw();
  };
  drawAll();
  addEventListener("hashchange", show);
  if (location.hash) show();
  darkScheme.addEventListener("change", drawAll);
  document.body.dataset.ready = "yes";
}

drawings.push(main());
