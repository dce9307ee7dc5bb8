"use strict";
// A typical iteration of each of two runs, under each other: a zoom of one is that of the other.

async function drawDifference() {
  const given = JSON.parse(element("difference-data").textContent);
  const events = columnsOf(await unpack(element("columns").textContent, given.layout));
  const charts = [];
  let first = 0;
  const together = (changed) => {
    for (const other of charts) {
      other.times = changed.times;
      other.redraw();
    }
  };
  given.runs.forEach((one, index) => {
    const place = element(`iteration-${"AB"[index]}`);
    const chart = iterationChart(place, given.names, events, { ...one, first }, () => together(chart));
    chart.length = Math.max(...given.runs.map((run) => run.length_ns));
    charts.push(chart);
    first += one.events;
  });
  const draw = () => {
    plainLegend(given.names);
    charts.forEach((chart) => chart.draw());
  };
  draw();
  darkScheme.addEventListener("change", draw);
  document.body.dataset.difference = "drawn";
  return charts;
}

const iterations = drawDifference();
drawings.push(iterations);
