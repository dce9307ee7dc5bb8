"use strict";
// What the timeline of all ranks shows, as the part of the address after #; what is as at the beginning is left out.

const PAUSE = 200; // ms; browsers refuse an address that changes with every step of a wheel
let waiting = 0;

function writeHashSoon() {
  clearTimeout(waiting);
  waiting = setTimeout(writeHash, PAUSE);
}

function writeHash() {
  const [from, to] = chart.times ?? [];
  const selected = chart.selected === null ? null : [events.rank[chart.selected], chart.selected - events.first[events.rank[chart.selected]]];
  // During a run the page may open at another iteration the next time: times and events are of this one.
  const asOpened = view.iteration === run.open && !chart.times && !selected;
  const parts = {
    iteration: asOpened ? "" : columns.iterations[view.iteration],
    ms: chart.times ? `${(from / 1e6).toFixed(6)}-${(to / 1e6).toFixed(6)}` : "",
    stage: view.stage,
    node: view.node,
    dp: view.dp,
    unfolded: Array.from(view.unfolded).join("."),
    ranks: Array.from(view.asked).join("."),
    top: topRank() ?? "",
    hidden: Array.from(view.hidden, (name) => run.names[name]).join(" "),
    event: selected ? selected.join(".") : "",
    map: element("map").selectedIndex ? element("map").value : "",
    predicted: view.predicted ? "yes" : "",
    path: view.path ? "yes" : "",
  };
  const hash = new URLSearchParams(Object.entries(parts).filter(([, value]) => value !== "")).toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, "", `#${hash}`);
}

// The first rank below the axis where the rows are scrolled.
function topRank() {
  if (!chart.box.scrollTop) return undefined;
  return chart.rows.find((row, index) => row.rank < run.ranks.length && chart.top(index) >= AXIS)?.rank;
}

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const numbers = (key) => (given.get(key) ?? "").split(/[.-]/).filter(Boolean).map(Number).filter(Number.isInteger);
  view.iteration = given.has("iteration") ? indexOf(Number(given.get("iteration")) || 0) : clamp(run.open, 0, columns.iterations.length - 1);
  for (const key of ["stage", "node", "dp"]) view[key] = choose(key, given.get(key) ?? "", "");
  choose("map", given.get("map"), element("map").options[0].value);
  const alike = run.like.flatMap((_, rank) => (isAlike(rank) ? [rank] : []));
  const stages = new Set(alike.map((rank) => run.ranks[rank].stage));
  view.unfolded = new Set(numbers("unfolded").filter((stage) => stages.has(stage)));
  view.asked = new Set(numbers("ranks").filter((rank) => alike.includes(rank)));
  view.hidden = new Set((given.get("hidden") ?? "").split(" ").map((name) => run.names.indexOf(name)).filter((name) => name >= 0));
  view.predicted = element("with-predicted").checked = run.predicted_ns > 0 && given.has("predicted");
  view.path = element("with-path").checked = hasPath() && given.has("path");
  const [rank, number] = numbers("event");
  const selected = run.ranks[rank] && number < columns.count[rank] ? events.first[rank] + number : null;
  chart.selected = selected !== null && isInTimes(selected) ? selected : null;
  if (chart.selected !== null && isFolded(rank)) view.asked.add(rank);
  const times = (given.get("ms") ?? "").split("-").map((time) => Number(time) * 1e6);
  chart.times = times.length === 2 && times[0] >= 0 && times[1] - times[0] >= SHORTEST ? times : null;
  return numbers("top")[0];
}

// Of a list of options the one with this value, or else another one; returns it.
function choose(id, value, other) {
  element(id).value = value;
  if (element(id).selectedIndex < 0) element(id).value = other;
  return element(id).value;
}

// Shows what the address says.
function restore() {
  const top = readHash();
  draw();
  chart.draw();
  chart.box.scrollTop = chart.tops[chart.rowOf.get(top)] ?? 0;
}
