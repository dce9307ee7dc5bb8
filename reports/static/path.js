"use strict";
// The critical path, over the bars of the timeline: an outline around each of its parts, of a message on its receiver.

const hasPath = () => run.path !== null;
let pathRanks; // of its parts, once they are read

// An overlay of the chart; nothing where the path is not asked for, or is that of another iteration.
function drawPath(context, chart) {
  chart.shown.path = [];
  if (!view.path || view.iteration !== run.path) return;
  context.strokeStyle = chart.colour("--text");
  context.lineWidth = 2;
  columns.path_rank.forEach((rank, i) => {
    const row = chart.rowOf.get(rank);
    const start = columns.path_start[i];
    const end = start + columns.path_duration[i];
    if (row === undefined || (end - start) / (chart.range[1] - chart.range[0]) < 0.5 / chart.wide) return;
    const place = columns.path_name[i] < 0 ? LOOKS.compute : taskStyle(run.names[columns.path_name[i]]);
    context.strokeRect(...chart.area(row, start, end, place));
    chart.shown.path.push({ row, start, end });
  });
}

// Ranks that the path goes over have a row though they may be like others.
function isOnPath(rank) {
  pathRanks ??= new Set(columns.path_rank);
  return pathRanks.has(rank);
}

// The box that shows it, and opens its iteration.
function makePathBox() {
  const box = element("with-path");
  box.disabled = !hasPath();
  chart.overlays.push(drawPath);
  box.addEventListener("change", () => {
    view.path = box.checked;
    if (view.path && view.iteration !== run.path) show(run.path);
    else draw();
  });
}
