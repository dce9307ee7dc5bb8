"use strict";
// From bars to what Plotly draws: traces with colours and hover texts, and the layout of the rows.

function hoverText(bar) {
  const i = bar.i;
  const predicted = isPredicted(events.rank[i]);
  const rank = run.ranks[events.rank[i]];
  const name = plain(run.names[events.name[i]]);
  const times = `start ${ms(bar.start)} ms<br>duration ${ms(bar.end - bar.start)} ms`;
  const where = predicted
    ? `stage ${stageOf(events.rank[i])}, predicted`
    : `rank ${events.rank[i]} · stage ${rank.stage} · data-parallel ${rank.dp}${rank.tp === null ? "" : ` · tensor-parallel ${rank.tp}`}<br>` +
    `node ${plain(rank.node)}${rank.host && rank.host !== rank.node ? ` (${plain(rank.host)})` : ""}<br>` +
    `iteration ${columns.iterations[view.iteration]}`;
  if (bar.count > 1) return `<b>${bar.count} × ${name}</b><br>${where}<br>${times} together; zoom in to see each`;
  const chunk = run.chunks > 1 ? ` · chunk ${events.chunk[i]}` : "";
  const microBatch = events.micro_batch[i] < 0 ? "" : ` · micro-batch ${events.micro_batch[i]}${chunk}`;
  const peer = events.peer[i] < 0 ? "" : `<br>peer rank ${events.peer[i]}`;
  const wait = predicted ? null : waiting(i);
  const waited = wait === null ? "" : `<br>waiting ${ms(wait)} ms of it`;
  return `<b>${name}</b><br>${where}${microBatch}${peer}<br>${times}${waited}`;
}

// One trace of bars per name, in the order of the names, so that what lies inside another task is drawn over it.
function traces(byName, pixel, numbered) {
  const cached = new Map();
  return run.names.map((name, index) => {
    const style = taskStyle(name);
    const bars = byName[index];
    const colour = (bar) => {
      const key = events.micro_batch[bar.i];
      if (!cached.has(`${index} ${key}`)) cached.set(`${index} ${key}`, shade(name, key, run.micro_batches));
      return cached.get(`${index} ${key}`);
    };
    const number = (bar) => {
      const wide = events.micro_batch[bar.i] >= 0 && bar.count === 1 && bar.end - bar.start > 16 * pixel;
      return wide ? String(events.micro_batch[bar.i]) : "";
    };
    return {
      type: "bar",
      orientation: "h",
      base: bars.map((bar) => bar.start / 1e6),
      x: bars.map((bar) => (bar.end - bar.start) / 1e6),
      y: bars.map((bar) => bar.row + (style.top + style.bottom) / 2),
      width: style.bottom - style.top,
      marker: { color: bars.map(colour), line: { width: 0 } },
      hovertext: bars.map(hoverText),
      hoverinfo: "text",
      text: numbered && name.endsWith("-compute") ? bars.map(number) : undefined,
      textposition: numbered && name.endsWith("-compute") ? "inside" : "none",
      insidetextanchor: "middle",
      textangle: 0,
      textfont: { size: 10 },
    };
  });
}

function layout(rows, times, [top, bottom], height) {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const stage = (row) => stageOf(rows[row]);
  const across = { layer: "below", xref: "paper", x0: 0, x1: 1 };
  const bands = rows.flatMap((_, row) =>
    stage(row) % 2 || isPredicted(rows[row])
      ? [{ ...across, type: "rect", y0: row - 0.5, y1: row + 0.5, fillcolor: colour(isPredicted(rows[row]) ? "--predicted" : "--band"), line: { width: 0 } }]
      : [],
  );
  const borders = rows.flatMap((_, row) =>
    row && stage(row) !== stage(row - 1) ? [{ ...across, type: "line", y0: row - 0.5, y1: row - 0.5, line: { width: 1, color: colour("--border") } }] : [],
  );
  return {
    barmode: "overlay",
    bargap: 0,
    hovermode: "closest",
    dragmode: "zoom",
    height,
    margin: { l: MARGIN, r: 12, t: 28, b: 4 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("--text") },
    hoverlabel: { align: "left", bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--text") } },
    showlegend: false,
    shapes: [...bands, ...borders],
    xaxis: { side: "top", range: times.map((ns) => ns / 1e6), ticksuffix: " ms", gridcolor: colour("--line"), zeroline: false },
    yaxis: {
      range: [bottom + 0.5, top - 0.5],
      fixedrange: rows.length <= ROWS_AT_ONCE,
      tickvals: rows.map((_, row) => row),
      ticktext: rows.map(labelOf),
      ticks: "outside",
      ticklen: 6,
      tickcolor: "rgba(0,0,0,0)",
      showgrid: false,
      zeroline: false,
    },
  };
}
