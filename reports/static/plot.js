"use strict";
// From bars to what Plotly draws: traces with colours and hover texts, and the layout of the rows. A page that has this
// script has `run`, with the names of tasks and the number of micro-batches, and `events`, columns of which a bar has an
// index i: its name and micro_batch.

const MOST_BARS = 8000; // more would make the page slow; beyond it short neighbours are drawn as one
const ROWS_AT_ONCE = 48;
const ROW_PIXELS = [22, 56]; // least and most
const LAYOUT = JSON.parse(document.getElementById("layout").textContent); // reports/figures/timeline.py
const MARGIN = LAYOUT.margin.l; // pixels for the labels of ranks
const ROW_FOR_NUMBERS = 30; // pixels, from which a bar has room for the number of its micro-batch

const element = (id) => document.getElementById(id);
const ms = (ns) => (ns / 1e6).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
// Plotly reads a little HTML in its texts; names are shown as they are.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Where there are more bars than MOST_BARS, those of a row and name that are shorter than a pixel and less than one apart
// become one; then with 1.3 pixels, and so on, so that no more is joined than must be. `span` is how much time is in
// view; all in ns.
function fewer(bars, pixel, span) {
  let kept = bars;
  for (let gap = pixel; kept.length > MOST_BARS && gap < 2 * span; gap *= 1.3) kept = merged(bars, gap);
  return kept;
}

function merged(bars, gap) {
  const last = new Map();
  const result = [];
  for (const bar of bars) {
    const key = bar.row * run.names.length + events.name[bar.i];
    const before = last.get(key);
    if (before && bar.end - bar.start < gap && before.short && bar.start - before.end < gap) {
      before.end = Math.max(before.end, bar.end);
      before.count += bar.count;
    } else {
      const copy = { ...bar, short: bar.end - bar.start < gap };
      last.set(key, copy);
      result.push(copy);
    }
  }
  return result;
}

// One trace of bars per name, in the order of the names, so that what lies inside another task is drawn over it; the last
// one covers with `wait` ns, from its begin, the part of a bar that is waiting for another rank.
function traces(all, pixel, numbered, hoverText) {
  return [...tasks(all, pixel, numbered, hoverText), waitingParts(all.filter((bar) => bar.wait > 0 && bar.count === 1))];
}

function waitingParts(bars) {
  const names = bars.map((bar) => run.names[events.name[bar.i]]);
  const places = names.map((name) => waitingPlace(taskStyle(name)));
  return {
    type: "bar",
    orientation: "h",
    base: bars.map((bar) => bar.start / 1e6),
    x: bars.map((bar) => bar.wait / 1e6),
    y: bars.map((bar, index) => bar.row + (places[index].top + places[index].bottom) / 2),
    width: places.map((place) => place.bottom - place.top),
    marker: { color: names.map(pale), line: { width: 0 } },
    hoverinfo: "skip",
    textposition: "none",
  };
}

function tasks(all, pixel, numbered, hoverText) {
  const cached = new Map();
  const byName = run.names.map(() => []);
  for (const bar of all) byName[events.name[bar.i]].push(bar);
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
      textfont: { size: 10, color: numbered ? bars.map((bar) => ink(colour(bar))) : undefined },
    };
  });
}

const CONFIG = { ...PLOTLY.config, doubleClick: "autosize" };

// rows: of each its label, its stage, and whether it was predicted rather than measured.
function layout(rows, times, [top, bottom], height) {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue(name).trim();
  const across = { layer: "below", xref: "paper", x0: 0, x1: 1 };
  const bands = rows.flatMap((_, row) =>
    rows[row].stage % 2 || rows[row].predicted
      ? [{ ...across, type: "rect", y0: row - 0.5, y1: row + 0.5, fillcolor: colour(rows[row].predicted ? "--predicted" : "--band"), line: { width: 0 } }]
      : [],
  );
  const borders = rows.flatMap((_, row) =>
    row && rows[row].stage !== rows[row - 1].stage ? [{ ...across, type: "line", y0: row - 0.5, y1: row - 0.5, line: { width: 1, color: colour("--border") } }] : [],
  );
  const base = themed(LAYOUT, css);
  return {
    ...base,
    height,
    shapes: [...bands, ...borders],
    xaxis: { ...base.xaxis, range: times.map((ns) => ns / 1e6) },
    yaxis: {
      ...base.yaxis,
      range: [bottom + 0.5, top - 0.5],
      fixedrange: rows.length <= ROWS_AT_ONCE,
      tickvals: rows.map((_, row) => row),
      ticktext: rows.map((row) => row.label),
    },
  };
}
