"use strict";
// Draws the figures of a page, each from the JSON that lies beside its place, or from what its `figure()` gives; a click
// on what has a link follows it.

const PAPER = { upright: 660, wide: 980 }; // pixels that A4 and Letter have room for
const places = () => [...document.querySelectorAll("div.plot")];

// As wide as its place, or, on paper, as `width` says.
async function drawFigure(place, width) {
  const { data, layout } = themed(place.figure?.() ?? JSON.parse(place.nextElementSibling.textContent));
  const sized = width ? { ...layout, width: Math.min(width, layout.width ?? width) } : layout;
  await Plotly.react(place, data, sized, { ...PLOTLY.config, modeBarButtonsToRemove: PLOTLY.unused, displayModeBar: place.figure ? false : "hover" });
  place.drawnWidth = place._fullLayout.width;
}

// Once Plotly has fitted a figure to another width: it leaves the legend as far up as its lines took before, be it over
// the bars, until the next drawing.
async function refitted(place, changed) {
  if (!changed.autosize) return;
  if (place.querySelector(".legend")) await Plotly.redraw(place);
  place.drawnWidth = place._fullLayout.width;
}

async function drawFigures() {
  for (const place of places()) await drawFigure(place);
  document.body.dataset.scheme = isDark() ? "dark" : "light";
}

// For the first time.
async function beginFigure(place) {
  await drawFigure(place);
  place.on("plotly_relayout", (changed) => refitted(place, changed));
  place.on("plotly_click", ({ points }) => points[0].customdata && location.assign(points[0].customdata));
  place.drawn?.();
}

async function drawAll() {
  for (const place of places()) await beginFigure(place);
  document.body.dataset.scheme = isDark() ? "dark" : "light";
  darkScheme.addEventListener("change", drawFigures);
  addEventListener("beforeprint", () => places().forEach((place) => drawFigure(place, place.closest("section.wide") ? PAPER.wide : PAPER.upright)));
  addEventListener("afterprint", drawFigures);
  document.body.dataset.figures = "drawn";
}

drawings.push(drawAll());
drawings.at(-1).catch((error) => {
  places().forEach((place) => place.append(`This figure cannot be drawn: ${error.message}`));
  throw error;
});
