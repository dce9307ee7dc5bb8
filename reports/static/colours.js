"use strict";
// How each task looks, as reports/figures/tasks.py says; waiting is pale.

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
  const base = taskStyle(name)[darkScheme.matches ? "dark" : "light"];
  const share = microBatch < 1 ? 0 : (0.5 * microBatch) / Math.max(microBatches - 1, microBatch);
  return `rgb(${mix(base, darkScheme.matches ? "#181c22" : "#ffffff", share).join()})`;
}

// The colour of the part of a task that is waiting for another rank.
function pale(name) {
  const base = taskStyle(name)[darkScheme.matches ? "dark" : "light"];
  return `rgb(${mix(base, darkScheme.matches ? "#181c22" : "#ffffff", 0.8).join()})`;
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
