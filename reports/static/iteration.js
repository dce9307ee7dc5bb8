"use strict";
// A chart of one iteration whose rows do not change, from columns of events: stage (the row), name, chunk, micro_batch,
// start, duration, waiting, and, where it was measured, peer.

// What is unpacked, with the names of the columns that events have here.
function columnsOf(columns) {
  return Object.fromEntries(Object.entries(columns).map(([name, column]) => [name.replace("predicted_", ""), column]));
}

// one: {first, events, rows: [{label, stage}], length_ns, micro_batches, chunks}, of which the events are the `events` from
// the `first` on; a row may also say what it is called where there is little room (short).
function iterationChart(place, names, events, one, changed = () => {}) {
  const barOf = (i) => ({ i, row: events.stage[i], start: events.start[i], end: events.start[i] + events.duration[i], wait: events.waiting[i], count: 1 });
  const all = Array.from({ length: one.events }, (_, k) => barOf(one.first + k));
  const tip = ({ row, time, bar }) => {
    const said = bar ? barLines(bar) : idleLines(all.filter((other) => other.row === row), time);
    return said.length ? [said[0], one.rows[row].label, ...said.slice(1)] : [];
  };
  const barLines = (bar) => {
    const name = names[events.name[bar.i]];
    const times = [`start ${ms(bar.start)} ms · length ${ms(bar.end - bar.start)} ms`];
    if (bar.count > 1) return [`${bar.count} × ${name}`, ...times, `total ${ms(bar.lasts)} ms; zoom in to see each`];
    const alike = all.filter((other) => other.row === bar.row && events.name[other.i] === events.name[bar.i]);
    const total = alike.reduce((sum, other) => sum + other.end - other.start, 0);
    const chunk = one.chunks > 1 ? ` · chunk ${events.chunk[bar.i]}` : "";
    const microBatch = events.micro_batch[bar.i] < 0 ? [] : [`micro-batch ${events.micro_batch[bar.i]}${chunk}`];
    const waits = bar.wait > 0 ? [`of which ${ms(bar.wait)} ms waiting`] : [];
    return [name, ...microBatch, ...times, ...waits, `total ${ms(total)} ms in ${alike.length} ${name} of this row`];
  };
  const idleLines = (ofRow, time) => {
    const around = ofRow.find((bar) => bar.start <= time && time < bar.start + bar.wait);
    if (around) {
      const peer = events.peer?.[around.i] ?? -1;
      return [`idle: waiting for ${peer < 0 ? "another rank" : `rank ${peer}`}`, `${ms(around.wait)} ms, in ${names[events.name[around.i]]}`];
    }
    const before = ofRow.filter((bar) => bar.end <= time).reduce((last, bar) => Math.max(last, bar.end), 0);
    const after = ofRow.filter((bar) => bar.start > time).reduce((first, bar) => Math.min(first, bar.start), Infinity);
    const busy = ofRow.some((bar) => bar.start <= time && time < bar.end);
    return busy || after === Infinity ? [] : ["idle: no event", `for ${ms(after - before)} ms`];
  };
  const chart = new Chart(place, {
    names,
    events,
    microBatches: one.micro_batches,
    find: (from, to, top, bottom) => all.filter((bar) => bar.end >= from && bar.start <= to && bar.row >= top && bar.row <= bottom),
    at: barOf,
    links: () => [],
    tip,
    neighbour: (i, step) => {
      const ofRow = all.filter((bar) => bar.row === (i === null ? 0 : events.stage[i])).sort((a, b) => a.start - b.start);
      return i === null ? ofRow[0]?.i : ofRow[ofRow.findIndex((bar) => bar.i === i) + step]?.i;
    },
    changed,
    toggle: () => {},
  });
  chart.rows = one.rows.map((row) => ({ short: `stage ${row.stage}`, ...row }));
  chart.length = one.length_ns;
  return chart;
}

// What the colours mean, where none of them can be hidden.
function plainLegend(names) {
  const entries = names.map((name) => Object.assign(document.createElement("span"), { className: "task", textContent: name }));
  entries.forEach((entry, name) => entry.style.setProperty("--task", shade(names[name], -1, 0)));
  element("legend").replaceChildren(...entries, waitingEntry());
}
