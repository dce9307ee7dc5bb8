"use strict";
// What a measured range of the timeline holds: of each task how many events, and how long they last within it together.

let totalsShown = ""; // of which range, rows and tasks

// By name: {events, ns, waiting} within two times (ns), of these ranks together; and in how many ns of each rank together
// nothing goes on. Tasks that lie inside others, such as clipping in the optimizer, count in both.
function totals([from, to], ranks) {
  const sums = run.names.map(() => ({ events: 0, ns: 0, waiting: 0 }));
  const within = (start, end) => Math.max(Math.min(end, to) - Math.max(start, from), 0);
  let blank = 0;
  for (const rank of ranks) {
    let reached = from;
    inTimes(rank, (i) => {
      const [start, end] = [events.start[i] - originOf(i), events.end[i] - originOf(i)];
      if (start > to || end < from || (within(start, end) === 0 && start < end)) return;
      const sum = sums[events.name[i]];
      sum.events++;
      sum.ns += within(start, end);
      sum.waiting += within(start, start + Math.max(events.waiting[i], 0));
      blank += Math.max(start - reached, 0);
      reached = Math.max(reached, Math.min(end, to));
    });
    blank += to - reached;
  }
  return { sums, blank };
}

// After each drawing of the timeline; does nothing while it still holds.
function showTotals() {
  if (!chart.ruler && !totalsShown) return;
  const ranks = chart.rows.filter((row) => !row.fold && !row.predicted).map((row) => row.rank);
  const measured = chart.ruler ? [...chart.ruler].sort((a, b) => a - b) : null;
  const key = JSON.stringify([measured, view.iteration, ranks, [...view.hidden]]);
  if (key === totalsShown) return;
  totalsShown = measured ? key : "";
  element("totals").hidden = !measured;
  if (!measured) return;
  const { sums, blank } = totals(measured, ranks);
  const whole = (measured[1] - measured[0]) * ranks.length;
  const share = (ns) => (whole ? `${digits((100 * ns) / whole, 1)}%` : "–");
  const found = sums.map((sum, name) => ({ ...sum, name })).filter((sum) => sum.events && !view.hidden.has(sum.name));
  found.sort((a, b) => b.ns - a.ns);
  const lines = found.map((sum) => [run.names[sum.name], sum.events.toLocaleString("en"), ms(sum.ns), sum.waiting ? ms(sum.waiting) : "", share(sum.ns)]);
  lines.push(["no event", "", ms(blank), "", share(blank)]);
  element("totals-range").textContent = `${ms(measured[1] - measured[0])} ms measured, from ${ms(measured[0])} to ${ms(measured[1])} ms, on ${howMany(ranks.length)}`;
  element("totals-rows").replaceChildren(...lines.map(totalsRow));
}

function totalsRow(cells) {
  const row = document.createElement("tr");
  row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
  return row;
}
