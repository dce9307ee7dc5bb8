"use strict";
// How each task looks, as reports/figures/tasks.py says; waiting is hatched.

const LOOKS = JSON.parse(document.getElementById("looks").textContent);
const LANES = LOOKS.lanes; // from above to below

// Waiting inside a task of the computation is none of its work.
const waitingPlace = (style) => (style.lane === LOOKS.compute.lane ? LOOKS.compute : style);

function taskStyle(name) {
  return Object.hasOwn(LOOKS.tasks, name) ? LOOKS.tasks[name] : LOOKS.other;
}

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function mix(colour, other, share) {
  const end = channels(other);
  return channels(colour).map((value, i) => Math.round(value + (end[i] - value) * share));
}

// The colour of a task, fainter from the first micro-batch to the last.
function shade(name, microBatch, microBatches) {
  const base = taskStyle(name)[isDark() ? "dark" : "light"];
  const share = microBatch < 1 ? 0 : (0.5 * microBatch) / Math.max(microBatches - 1, microBatch);
  return `rgb(${mix(base, isDark() ? "#181c22" : "#ffffff", share).join()})`;
}

const HATCH = 6; // pixels from one line to the next
const hatches = new Map();

// What fills the part of a task that is waiting for another rank: lines of its colour, on next to nothing.
function hatch(name, context) {
  const [base, ground] = [taskStyle(name)[isDark() ? "dark" : "light"], isDark() ? "#181c22" : "#ffffff"];
  const key = `${base} ${ground}`;
  if (!hatches.has(key)) hatches.set(key, context.createPattern(hatchTile(base, ground), "repeat"));
  return hatches.get(key);
}

function hatchTile(base, ground) {
  const tile = new OffscreenCanvas(HATCH, HATCH);
  const context = tile.getContext("2d");
  context.fillStyle = `rgb(${mix(base, ground, 0.88).join()})`;
  context.fillRect(0, 0, HATCH, HATCH);
  context.strokeStyle = `rgb(${mix(base, ground, 0.35).join()})`;
  context.beginPath();
  for (const from of [-HATCH, 0, HATCH]) {
    context.moveTo(from, HATCH);
    context.lineTo(from + HATCH, 0);
  }
  context.stroke();
  return tile;
}

// The entry of a legend that says so.
function waitingEntry() {
  return Object.assign(document.createElement("span"), { className: "task waiting", textContent: "waiting, in the colour of its task" });
}

// Black or white, whichever stands out from a colour `rgb(…)`: at least 4.5 times as light or dark (WCAG 2, 1.4.3).
function ink(colour) {
  const [red, green, blue] = colour.match(/\d+/g).map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

// Dark blue over grey to yellow, even in lightness: read alike by everybody and on both backgrounds.
const SCALE = ["#00204c", "#31446b", "#666970", "#958f78", "#cab969", "#ffe945"];

// Red, green and blue of a share from 0 to 1.
function scaleColour(share) {
  const at = share * (SCALE.length - 1);
  const low = Math.min(Math.floor(at), SCALE.length - 2);
  return mix(SCALE[low], SCALE[low + 1], at - low);
}
