"use strict";
// The heat map of all ranks and iterations: one pixel a cell, stretched by the style sheet.

const SHADES = Array.from({ length: 101 }, (_, percent) => scaleColour(percent / 100));

// What the map can show of a rank in an iteration, from a column of shares in 1/1000, by rank and iteration, -1 for none;
// period: of the iteration, ns.
const percent = (share) => share / 10;
const MAPS = {
  bubble: { column: "bubble_share", of: percent, unit: "%", least: 30, most: 100, says: "of passes + bubble is waiting for other stages" },
  communication: { column: "communication_share", of: percent, unit: "%", least: 30, most: 100, says: "of the iteration is exposed communication" },
  compute: { column: "compute_share", of: (share, period) => (share / 1e3) * (period / 1e6), unit: " ms", least: 0, most: Infinity, says: "of forward and backward computation" },
};

// rows: ranks from top to bottom; kind: a key of MAPS.
function drawOverview(rows, columns, kind) {
  const numbers = columns.iterations;
  const map = MAPS[kind];
  const values = Array.from(columns[map.column], (share, cell) =>
    share < 0 ? NaN : map.of(share, columns.iteration_period[cell % numbers.length]),
  );
  const [low, high] = mapRange(values, map);
  const canvas = document.getElementById("overview");
  canvas.width = numbers.length;
  canvas.height = Math.max(rows.length, 1);
  const image = new ImageData(canvas.width, canvas.height);
  rows.forEach((rank, row) => {
    for (let k = 0; k < numbers.length; k++) {
      const value = values[rank * numbers.length + k];
      if (Number.isNaN(value)) continue;
      const shade = SHADES[Math.round((100 * (value - low)) / (high - low))];
      image.data.set([...shade, 255], (row * numbers.length + k) * 4);
    }
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.height = `${Math.min(Math.max(rows.length * 6, 36), 96)}px`;
  drawScale(low, high, map);
  label("overview-ranks", rows.length ? `rank ${rows[0]}` : "", rows.length > 1 ? `rank ${rows.at(-1)}` : "");
  label("overview-iterations", `iteration ${numbers[0]}`, numbers.length > 1 ? `${numbers.at(-1)}` : "");
}

// Least and largest value, out to round numbers, but no nearer than `least`: noise should not look like a difference.
function mapRange(values, map) {
  const known = values.filter((value) => !Number.isNaN(value));
  const least = known.reduce((a, b) => Math.min(a, b));
  const most = known.reduce((a, b) => Math.max(a, b));
  const step = 10 ** Math.floor(Math.log10(Math.max(most, 1e-6)));
  const round = map.unit === "%" ? 10 : step / 2;
  const low = Math.floor(least / round) * round;
  const high = Math.max(Math.ceil(most / round) * round, low + round);
  const wanted = Math.max(map.least, high * 0.3);
  return high - low < wanted ? [Math.max(high - wanted, 0), Math.min(Math.max(high, wanted), map.most)] : [low, high];
}

function drawScale(low, high, map) {
  const canvas = document.getElementById("scale").getContext("2d");
  SHADES.forEach((shade, x) => {
    canvas.fillStyle = `rgb(${shade.join()})`;
    canvas.fillRect(x, 0, 1, 1);
  });
  const text = (value) => `${Number(value.toPrecision(3))}${map.unit}`;
  document.getElementById("scale-low").textContent = text(low);
  document.getElementById("scale-high").textContent = text(high);
  document.getElementById("scale-says").textContent = `${map.says}; hatched: no events`;
}

// All values of a cell in words.
function cellText(rank, column, columns) {
  const cell = rank * columns.iterations.length + column;
  if (columns.compute_share[cell] < 0) return "no events";
  const of = (map) => `${map.of(columns[map.column][cell], columns.iteration_period[column]).toFixed(1)}${map.unit}`;
  return Object.entries(MAPS).map(([kind, map]) => `${kind} ${of(map)}`).join(", ");
}

function label(id, ...texts) {
  const spans = texts.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
  document.getElementById(id).replaceChildren(...spans);
}

function markIteration(index, count) {
  const mark = document.getElementById("overview-mark");
  mark.style.left = `${(100 * index) / count}%`;
  mark.style.width = `${100 / count}%`;
}

// Row and column of the heat map under the pointer.
function overviewCell(event, rows, columns) {
  const box = document.getElementById("overview").getBoundingClientRect();
  const cell = (offset, length, count) => Math.min(Math.max(Math.floor((offset / length) * count), 0), count - 1);
  return [cell(event.clientY - box.top, box.height, rows), cell(event.clientX - box.left, box.width, columns)];
}
