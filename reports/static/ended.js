"use strict";
// The end of a run that failed or stands still: in its last iteration, a line where the culprit's last event ends, and a
// band in its row from there on.

const isCulprit = (rank) => run.end !== null && run.end.ranks.includes(rank);
const isLastIteration = () => view.iteration === columns.iterations.length - 1;

// ns from the start of the iteration; 0 of a rank without events in it.
function endOf(rank) {
  let last = 0;
  ofRank(rank, (i) => (last = Math.max(last, events.end[i] - originOf(i))));
  return last;
}

function drawEnd(context, chart) {
  chart.shown.ended = [];
  if (run.end === null || !isLastIteration()) return;
  context.fillStyle = context.strokeStyle = chart.colour("--bad");
  const right = chart.x(chart.length);
  for (const rank of run.end.ranks) {
    const row = chart.rowOf.get(rank);
    if (row === undefined) continue;
    const x = chart.x(endOf(rank));
    const [top, height] = [chart.top(row), chart.height(row)];
    context.globalAlpha = 0.18;
    context.fillRect(x, top, Math.max(right - x, 2), height);
    context.globalAlpha = 1;
    context.fillRect(x - 1, top, 2, height);
    chart.shown.ended.push({ row, time: chart.time(x) });
  }
  context.setLineDash([4, 3]);
  context.strokeRect(right - 1, chart.top(0), 0, chart.below);
  context.setLineDash([]);
}

// For the line above the rows.
const endText = () => (run.end !== null && isLastIteration() ? ["its last iteration; the end is marked"] : []);
