"use strict";
// The heat map of all ranks and iterations: one pixel a cell, stretched by the style sheet.

const SHADES = Array.from({ length: 101 }, (_, percent) => scaleColour(percent / 100));

// rows: ranks from top to bottom; share: 1/1000 by rank and iteration, -1 for none.
function drawOverview(rows, numbers, share) {
  const [low, high] = shareRange(share);
  const canvas = document.getElementById("overview");
  canvas.width = numbers.length;
  canvas.height = Math.max(rows.length, 1);
  const image = new ImageData(canvas.width, canvas.height);
  rows.forEach((rank, row) => {
    for (let k = 0; k < numbers.length; k++) {
      const value = share[rank * numbers.length + k];
      if (value < 0) continue;
      const shade = SHADES[Math.round((100 * (value - low)) / (high - low))];
      image.data.set([...shade, 255], (row * numbers.length + k) * 4);
    }
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.style.height = `${Math.min(Math.max(rows.length * 6, 48), 128)}px`;
  drawScale(low, high);
  label("overview-ranks", rows.length ? `rank ${rows[0]}` : "", rows.length > 1 ? `rank ${rows.at(-1)}` : "");
  label("overview-iterations", `iteration ${numbers[0]}`, numbers.length > 1 ? `${numbers.at(-1)}` : "");
}

// Least and largest share, out to the next 10 %, but not so near that noise looks like a difference.
function shareRange(share) {
  const known = share.filter((value) => value >= 0);
  const low = Math.floor(known.reduce((a, b) => Math.min(a, b)) / 100) * 100;
  const high = Math.ceil(known.reduce((a, b) => Math.max(a, b)) / 100) * 100;
  return high - low < 300 ? [Math.max(high - 300, 0), Math.max(high, 300)] : [low, high];
}

function drawScale(low, high) {
  const canvas = document.getElementById("scale").getContext("2d");
  SHADES.forEach((shade, x) => {
    canvas.fillStyle = `rgb(${shade.join()})`;
    canvas.fillRect(x, 0, 1, 1);
  });
  document.getElementById("scale-low").textContent = `${low / 10} %`;
  document.getElementById("scale-high").textContent = `${high / 10} %`;
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
