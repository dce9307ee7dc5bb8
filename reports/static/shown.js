"use strict";
// The events that the timeline of all ranks shows: those of an iteration, and, without a flush, those of others at the same
// time.

const NESTED = 8; // events that may lie inside one that is still going on

const isPredicted = (rank) => rank >= run.ranks.length;
const originOf = (i) => (i < events.measured ? columns.iteration_start[view.iteration] : 0);

// Calls with every event of a rank in the iteration, in the order of their starts.
function ofRank(rank, see) {
  if (isPredicted(rank)) {
    for (let i = events.measured; i < events.rank.length; i++) if (events.rank[i] === rank) see(i);
    return;
  }
  const [from, to] = slices.get(rank) ?? [0, 0];
  for (let at = from; at < to; at++) see(events.order[at]);
}

// Calls with every event of a rank that lies in the times of the iteration. Without a flush a rank is already at the next
// iteration while others are still at this one.
function inTimes(rank, see) {
  if (!run.streams || isPredicted(rank)) return ofRank(rank, see);
  const begin = columns.iteration_start[view.iteration];
  const end = begin + columns.iteration_length[view.iteration];
  const first = events.first[rank];
  const stop = first + columns.count[rank];
  let [low, high] = [first, stop];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (events.start[middle] < begin) low = middle + 1;
    else high = middle;
  }
  for (let i = Math.max(low - NESTED, first); i < stop && events.start[i] <= end; i++) if (events.end[i] > begin) see(i);
}

// Of an event, as an index; that of a prediction is the one shown.
const iterationOf = (i) => (i < events.measured ? events.iteration[i] : view.iteration);

// Whether an event lies in the times of the iteration.
function isInTimes(i) {
  if (iterationOf(i) === view.iteration) return true;
  const begin = columns.iteration_start[view.iteration];
  return run.streams && events.end[i] > begin && events.start[i] <= begin + columns.iteration_length[view.iteration];
}

function sliced() {
  const found = new Map();
  for (let at = events.from[view.iteration]; at < events.from[view.iteration + 1]; at++) {
    const rank = events.rank[events.order[at]];
    if (found.has(rank)) found.get(rank)[1] = at + 1;
    else found.set(rank, [at, at + 1]);
  }
  return found;
}

function find(from, to, first, last) {
  const bars = [];
  for (let row = first; row <= last; row++) {
    if (chart.rows[row].fold) continue;
    inTimes(chart.rows[row].rank, (i) => {
      const [start, end] = [events.start[i] - originOf(i), events.end[i] - originOf(i)];
      if (end >= from && start <= to && !view.hidden.has(events.name[i])) bars.push({ i, row, start, end, wait: events.waiting[i], count: 1, beside: run.streams && iterationOf(i) !== view.iteration });
    });
  }
  return bars;
}

function at(i) {
  if (!isInTimes(i)) return undefined;
  const rank = events.rank[i];
  const own = chart.rowOf.get(rank);
  const row = own ?? (isPredicted(rank) ? undefined : chart.foldOf.get(run.ranks[rank].stage));
  return row === undefined ? undefined : { row, folded: own === undefined, start: events.start[i] - originOf(i), end: events.end[i] - originOf(i) };
}

// The messages of the iteration. They carry no label: of those that a rank sends to another, forward or backward, the
// k-th is what the other receives k-th; without a flush it is the one of the same micro-batch.
function paired() {
  const channels = new Map();
  for (const rank of slices.keys()) {
    inTimes(rank, (i) => {
      for (const [verb, ways] of Object.entries(run.messages[events.name[i]])) {
        const [from, to] = verb === "send" ? [rank, events.peer[i]] : [events.peer[i], rank];
        for (const way of ways) {
          const key = `${way} ${from} ${to} ${run.streams ? events.micro_batch[i] : ""}`;
          if (!channels.has(key)) channels.set(key, { send: [], recv: [] });
          channels.get(key)[verb].push(i);
        }
      }
    });
  }
  return Array.from(channels.values()).flatMap(({ send, recv }) => recv.flatMap((i, k) => (k < send.length ? [[send[k], i]] : [])));
}

function neighbour(i, step) {
  const row = i === null ? chart.rows.find((one) => !one.fold) : chart.rows[at(i)?.row ?? 0];
  const all = [];
  if (row && !row.fold) inTimes(row.rank, (other) => view.hidden.has(events.name[other]) || all.push(other));
  return i === null ? all[0] : all[all.indexOf(i) + step];
}
