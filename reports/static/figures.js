"use strict";
// Draws the figures of a page, each from the JSON that lies beside its place; a click on what has a link follows it.

async function drawFigures() {
  for (const place of document.querySelectorAll("div.plot")) {
    const { data, layout } = themed(JSON.parse(place.nextElementSibling.textContent));
    const fresh = !place.data;
    await Plotly.react(place, data, layout, { ...PLOTLY.config, modeBarButtonsToRemove: PLOTLY.unused });
    if (fresh) place.on("plotly_click", ({ points }) => points[0].customdata && location.assign(points[0].customdata));
  }
}

async function drawAll() {
  await drawFigures();
  darkScheme.addEventListener("change", drawFigures);
  document.body.dataset.figures = "drawn";
}

drawAll().catch((error) => {
  document.querySelectorAll("div.plot").forEach((place) => place.append(`This figure cannot be drawn: ${error.message}`));
  throw error;
});
