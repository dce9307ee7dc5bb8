"use strict";
// The inverse of reports/figures/pack.py: base64 of a zlib stream of byte planes of zigzag-coded integers.

async function unpack(text, layout) {
  const planes = new Uint8Array(await inflated(text).arrayBuffer());

  const columns = {};
  let at = 0;
  for (const [name, length, width] of layout) {
    // Up to three bytes fit an int32 with its sign; more need the 53 bits of a double.
    const values = width < 4 ? new Int32Array(length) : new Float64Array(length);
    for (let i = 0; i < length; i++) {
      let coded = 0;
      for (let plane = width - 1; plane >= 0; plane--) coded = coded * 256 + planes[at + plane * length + i];
      values[i] = coded % 2 ? -(coded + 1) / 2 : coded / 2;
    }
    columns[name] = values;
    at += length * width;
  }
  return columns;
}

// Undoes the differences of event_columns and sorts the events by iteration, for one iteration is drawn at a time. The
// predicted events follow those of the run, which are `measured` in number: their rank is `ranks` and their stage more,
// their times count from the start of an iteration, and they are in no order.
function assemble(columns, iterations, ranks) {
  const length = columns.name.length;
  const all = length + columns.predicted_name.length;
  const both = (measured, predicted) => {
    const values = new Int32Array(all);
    values.set(measured);
    values.set(predicted, length);
    return values;
  };
  const events = {
    measured: length,
    rank: both([], columns.predicted_stage.map((stage) => ranks + stage)),
    name: both(columns.name, columns.predicted_name),
    iteration: new Int32Array(length), // index into the numbers of the iterations
    chunk: both(columns.chunk, columns.predicted_chunk),
    micro_batch: both(columns.micro_batch, columns.predicted_micro_batch),
    peer: both(columns.peer, columns.predicted_stage.map(() => -1)),
    start: new Float64Array(all), // ns from the first event of the run
    end: new Float64Array(all),
    waiting: new Float64Array(all), // ns of it; -1 where it is not known
    first: [], // of each rank the index of its first event
  };
  events.waiting.set(columns.waiting);
  events.waiting.set(columns.predicted_waiting, length);
  columns.predicted_start.forEach((start, i) => {
    events.start[length + i] = start;
    events.end[length + i] = start + columns.predicted_duration[i];
  });
  const index = new Map(Array.from(iterations, (number, i) => [number, i]));
  const counts = new Int32Array(iterations.length + 1);
  let number = 0;
  let i = 0;
  columns.count.forEach((count, rank) => {
    let before = 0;
    events.first.push(i);
    for (const stop = i + count; i < stop; i++) {
      number += columns.iteration[i];
      events.rank[i] = rank;
      events.iteration[i] = index.get(number);
      events.start[i] = before + columns.gap[i];
      events.end[i] = before = events.start[i] + columns.duration[i];
      counts[events.iteration[i] + 1]++;
    }
  });
  for (let k = 1; k < counts.length; k++) counts[k] += counts[k - 1];
  events.from = counts.slice(); // events of iteration k: order[from[k]] ... order[from[k + 1] - 1], by rank, then start
  events.order = new Int32Array(length);
  for (let k = 0; k < length; k++) events.order[counts[events.iteration[k]]++] = k;
  return events;
}
