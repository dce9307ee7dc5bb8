"use strict";
// The axis of times above the rows of a chart (chart.js), with lines down through them.

const TICK_PIXELS = 48; // least between two ticks

// Whether a tick there has room for its label.
function isLabelled(chart, x) {
  return x - chart.left > 12 && x < chart.left + chart.wide - 24;
}

// How many ticks with a label there are at a step of so many ns.
function ticks(chart, step) {
  const [from, to] = chart.range;
  const numbers = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) numbers.push(k);
  return numbers.filter((k) => isLabelled(chart, chart.x(k * step))).length;
}

// ns between two ticks: no closer than labels look well, but closer where only one would have a label.
function tickStep(chart) {
  const [from, to] = chart.range;
  const pixel = (to - from) / chart.wide;
  const power = 10 ** Math.floor(Math.log10(pixel * TICK_PIXELS));
  const steps = [1, 2, 5, 10, 20, 50].map((factor) => factor * power).filter((one) => one >= pixel * TICK_PIXELS);
  const usual = steps.find((one) => one >= pixel * (chart.narrow ? 70 : 96));
  return steps.filter((one) => one <= usual).findLast((one) => ticks(chart, one) > 1) ?? usual;
}

function drawAxis(chart) {
  const { context } = chart;
  const [from, to] = chart.range;
  const step = tickStep(chart);
  const places = clamp(Math.ceil(6 - Math.log10(step) - 1e-9), 0, 6);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (let k = Math.ceil(from / step); k * step <= to; k++) {
    const x = chart.x(k * step);
    context.fillStyle = chart.colour("--line");
    context.globalAlpha = 0.7;
    context.fillRect(x, AXIS - 5, 1, chart.below);
    context.globalAlpha = 1;
    context.fillStyle = chart.colour("--soft");
    if (isLabelled(chart, x)) context.fillText(`${digits((k * step) / 1e6, places)} ms`, x, 10);
  }
  if (chart.share < 20) return;
  context.fillStyle = chart.colour("--soft");
  context.textAlign = "right";
  context.fillText("bubble", chart.box.clientWidth - 4, 10, chart.share - 2);
}
