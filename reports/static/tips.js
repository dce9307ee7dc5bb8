"use strict";
// What the pointer says of the timeline of all ranks: an event, several that are drawn as one, or what a row waits for.

function tip({ row, time, bar }) {
  return bar ? barText(bar) : idleText(chart.rows[row], time);
}

function whereText(row) {
  if (isPredicted(row)) return [`stage ${run.stages[row - run.ranks.length]}, predicted`];
  const rank = run.ranks[row];
  return [
    `rank ${row} · stage ${run.stages[rank.stage]} · data-parallel ${rank.dp}${rank.tp === null ? "" : ` · tensor-parallel ${rank.tp}`}`,
    `node ${rank.node}${rank.host && rank.host !== rank.node ? ` (${rank.host})` : ""}`,
  ];
}

function barText(bar) {
  const i = bar.i;
  const rank = events.rank[i];
  const name = run.names[events.name[i]];
  const times = [`start ${ms(bar.start)} ms · length ${ms(bar.end - bar.start)} ms`];
  const chunk = run.chunks > 1 ? ` · chunk ${events.chunk[i]}` : "";
  const microBatch = events.micro_batch[i] < 0 || bar.count > 1 ? [] : [`micro-batch ${events.micro_batch[i]}${chunk}`];
  const numbers = [...(isPredicted(rank) ? [] : [`iteration ${columns.iterations[iterationOf(i)]}`]), ...microBatch];
  const whole = [name, ...whereText(rank), ...(numbers.length ? [numbers.join(" · ")] : [])];
  if (bar.count > 1) return [`${bar.count} × ${name}`, ...whole.slice(1), ...times, `total ${ms(bar.lasts)} ms; zoom in to see each`];
  if (events.peer[i] >= 0) whole.push(`peer rank ${events.peer[i]}`);
  if (bar.wait >= 0) times.push(`of which ${ms(bar.wait)} ms waiting`);
  return [...whole, ...times, totalText(rank, i)];
}

// What the events of a name last together on a rank, in the iteration of one of them.
function totalText(rank, i) {
  let [count, lasts] = [0, 0];
  inTimes(rank, (other) => {
    if (events.name[other] !== events.name[i] || iterationOf(other) !== iterationOf(i)) return;
    count++;
    lasts += events.end[other] - events.start[other];
  });
  return `total ${ms(lasts)} ms in ${count} ${run.names[events.name[i]]} of this ${isPredicted(rank) ? "stage" : "rank"}`;
}

// What a row does where nothing is drawn: it waits for another rank, or no event says.
function idleText({ rank }, time) {
  const origin = isPredicted(rank) ? 0 : columns.iteration_start[view.iteration];
  let [around, before, after] = [null, null, null];
  inTimes(rank, (i) => {
    const [start, end] = [events.start[i] - origin, events.end[i] - origin];
    if (start <= time && time < end) {
      if (around === null || time < start + events.waiting[i]) around = i;
    } else if (end <= time) {
      if (before === null || events.end[i] > events.end[before]) before = i;
    } else if (after === null || events.start[i] < events.start[after]) after = i;
  });
  const where = whereText(rank);
  if (around !== null) {
    const name = run.names[events.name[around]];
    const until = events.start[around] - origin + events.waiting[around];
    if (time >= until) return [name, ...where, `${ms(events.end[around] - origin - Math.max(until, events.start[around] - origin))} ms of it is not waiting`];
    return [`idle: waiting for ${waitedFor(around)}`, ...where, `${ms(events.waiting[around])} ms, in ${name}, until ${ms(until)} ms`];
  }
  const parts = [before === null ? null : `after ${run.names[events.name[before]]}`, after === null ? null : `before ${run.names[events.name[after]]}`];
  const lasts = before === null || after === null ? "" : ` for ${ms(events.start[after] - events.end[before])} ms`;
  const next = after !== null && events.waiting[after] > 0 ? [`which waits for ${waitedFor(after)}, ${ms(events.waiting[after])} ms`] : [];
  return [`idle: no event${lasts}`, ...where, parts.filter(Boolean).join(", "), ...next];
}

// Who begins last, so that an event has to wait.
function waitedFor(i) {
  if (isPredicted(events.rank[i])) return "another stage";
  if (events.peer[i] >= 0) return `rank ${events.peer[i]} to send`;
  const until = events.start[i] + events.waiting[i];
  for (let at = events.from[iterationOf(i)]; at < events.from[iterationOf(i) + 1]; at++) {
    const other = events.order[at];
    if (events.name[other] === events.name[i] && events.start[other] === until) return `rank ${events.rank[other]} to begin`;
  }
  return "the last rank of its group";
}
