"use strict";
// How each task looks. Forward is blue and backward orange wherever they are; waiting is pale; the rest has hues that
// stay apart for the common kinds of colour blindness (after Okabe and Ito). Lanes tell apart what hues cannot. Beside
// the names of tdpp's engine these are the timers of Megatron-LM.

const LANES = ["communication", "computation", "data and loss"]; // from above to below

// top and bottom: within a rank's row, which goes from -0.5 (above) to 0.5 (below).
const SEND = { lane: LANES[0], top: -0.44, bottom: -0.31 };
const RECEIVE = { lane: LANES[0], top: -0.29, bottom: -0.12 };
const COMPUTE = { lane: LANES[1], top: -0.1, bottom: 0.26 };
// Communication for which computation stands still: it covers what it lies inside.
const ACROSS = { lane: LANES[0], top: RECEIVE.top, bottom: COMPUTE.bottom };
const INSIDE = { lane: LANES[1], top: -0.02, bottom: 0.18 };
const DATA = { lane: LANES[2], top: 0.29, bottom: 0.43 };
const TASKS = {
  "forward-send": { ...SEND, light: "#4f9fd0", dark: "#58a6d6" },
  "backward-send": { ...SEND, light: "#d8a03c", dark: "#c9963c" },
  "forward-recv": { ...RECEIVE, light: "#bcd9ec", dark: "#2f4f66" },
  "backward-recv": { ...RECEIVE, light: "#f3d9b8", dark: "#6b4f2a" },
  "forward-send-forward-recv": { ...RECEIVE, light: "#8fbfe0", dark: "#3c6f94" },
  "backward-send-backward-recv": { ...RECEIVE, light: "#e8bd85", dark: "#8a6433" },
  "forward-send-backward-recv": { ...RECEIVE, light: "#dcb9d8", dark: "#7a5477" },
  "backward-send-forward-recv": { ...RECEIVE, light: "#a9cfc4", dark: "#3f6f62" },
  "forward-backward-send-forward-backward-recv": { ...RECEIVE, light: "#a9a9b8", dark: "#5d5d70" },
  "grads-all-reduce": { ...RECEIVE, light: "#a5549b", dark: "#c07ab6" },
  "layernorm-grads-all-reduce": { ...RECEIVE, light: "#c98bc2", dark: "#8f4f86" },
  "embedding-grads-all-reduce": { ...RECEIVE, light: "#6d2a66", dark: "#e6b3de" },
  "grads-reduce-scatter": { ...RECEIVE, light: "#8c4a9e", dark: "#a98bd0" },
  "overlapped-grads-all-reduce": { ...SEND, light: "#c79ac2", dark: "#7d4a77" },
  "tensor-all-reduce": { ...ACROSS, light: "#008c95", dark: "#35b8c0" },
  "tensor-all-gather": { ...ACROSS, light: "#00636b", dark: "#7fd9de" },
  "tensor-reduce-scatter": { ...ACROSS, light: "#5fb3b3", dark: "#1b7f86" },
  "grad-norm-all-reduce": { ...ACROSS, light: "#93679e", dark: "#b48cc4" },
  "params-all-gather": { ...ACROSS, light: "#4d3f9e", dark: "#8f86ff" },
  "forward-compute": { ...COMPUTE, light: "#0067a5", dark: "#3f9ae0" },
  "backward-compute": { ...COMPUTE, light: "#cf5a00", dark: "#ef7d22" },
  "backward-input-compute": { ...COMPUTE, light: "#e06d1c", dark: "#ff9a4d" },
  "backward-weight-compute": { ...COMPUTE, light: "#7a3a08", dark: "#f9c795" },
  optimizer: { ...COMPUTE, light: "#00875f", dark: "#1fae83" },
  "optimizer-copy-to-main-grad": { ...INSIDE, light: "#b9e3d2", dark: "#0a4736" },
  "optimizer-unscale-and-check-inf": { ...INSIDE, light: "#d6c27a", dark: "#6f6428" },
  "optimizer-clip-main-grad": { ...INSIDE, light: "#7fd0b3", dark: "#0c5c44" },
  "optimizer-count-zeros": { ...INSIDE, light: "#9aa7b5", dark: "#4c5866" },
  "optimizer-inner-step": { ...INSIDE, light: "#35a583", dark: "#6fd3b4" },
  "optimizer-copy-main-to-model-params": { ...INSIDE, light: "#5f7d2c", dark: "#b7d67a" },
  "batch-generator": { ...DATA, light: "#6f7782", dark: "#98a1ad" },
  "post-process": { ...DATA, light: "#a1683a", dark: "#d6a377" },
  "loss-compute": { ...DATA, light: "#b3a000", dark: "#e2d44a" },
};
// Waiting inside a task of the computation is none of its work.
const waitingPlace = (style) => (style.lane === COMPUTE.lane ? COMPUTE : style);
const OTHER_TASK = { ...DATA, light: "#444444", dark: "#cccccc" };

const darkScheme = matchMedia("(prefers-color-scheme: dark)");

function taskStyle(name) {
  return Object.hasOwn(TASKS, name) ? TASKS[name] : OTHER_TASK;
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
