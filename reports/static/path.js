"use strict";
// The critical path, over the bars of the timeline: an outline around each of its parts, of a message on its receiver.

const hasPath = () => run.path !== null;

// Of the iteration in view, for these rows; nothing where the path is not asked for, or is that of another iteration.
function pathTraces(rows, pixel) {
  if (!view.path || view.iteration !== run.path) return [];
  const rowOf = new Map(rows.map((rank, row) => [rank, row]));
  const parts = Array.from(columns.path_rank.keys()).filter((i) => rowOf.has(columns.path_rank[i]) && columns.path_duration[i] > pixel / 2);
  const places = parts.map((i) => (columns.path_name[i] < 0 ? LOOKS.compute : taskStyle(run.names[columns.path_name[i]])));
  return [
    {
      type: "bar",
      name: "critical path",
      orientation: "h",
      base: parts.map((i) => columns.path_start[i] / 1e6),
      x: parts.map((i) => columns.path_duration[i] / 1e6),
      y: parts.map((i, index) => rowOf.get(columns.path_rank[i]) + (places[index].top + places[index].bottom) / 2),
      width: places.map((place) => place.bottom - place.top),
      marker: { color: "rgba(0,0,0,0)", line: { width: 2, color: getComputedStyle(document.documentElement).getPropertyValue("--text").trim() } },
      hoverinfo: "skip",
      textposition: "none",
    },
  ];
}

// The box that shows it, and opens its iteration.
function makePathBox() {
  const box = element("with-path");
  box.checked = view.path = hasPath() && location.hash === "#path";
  box.disabled = !hasPath();
  box.addEventListener("change", () => {
    view.path = box.checked;
    if (view.path && view.iteration !== run.path) show(run.path);
    else draw();
  });
}
