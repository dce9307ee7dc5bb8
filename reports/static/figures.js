"use strict";
// Draws the figures of a page, each from the JSON that lies beside its place; a click on what has a link follows it.

const THEMED = JSON.parse(document.getElementById("themed").textContent); // colour by day: variable of the style sheet
const night = matchMedia("(prefers-color-scheme: dark)");
const FIGURE_CONFIG = {
  displaylogo: false,
  showSendToCloud: false,
  plotlyServerURL: "",
  responsive: true,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
};

// The same with every colour that has a counterpart by night replaced by what the style sheet says now.
function themed(value, css) {
  if (typeof value === "string") return Object.hasOwn(THEMED, value) ? css.getPropertyValue(THEMED[value]).trim() : value;
  if (Array.isArray(value)) return value.map((one) => themed(one, css));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one, css)]));
}

async function drawFigures() {
  const css = getComputedStyle(document.documentElement);
  for (const place of document.querySelectorAll("div.plot")) {
    const { data, layout } = themed(JSON.parse(place.nextElementSibling.textContent), css);
    const fresh = !place.data;
    await Plotly.react(place, data, layout, FIGURE_CONFIG);
    if (fresh) place.on("plotly_click", ({ points }) => points[0].customdata && location.assign(points[0].customdata));
  }
}

async function drawAll() {
  await drawFigures();
  night.addEventListener("change", drawFigures);
  document.body.dataset.figures = "drawn";
}

drawAll().catch((error) => {
  document.querySelectorAll("div.plot").forEach((place) => place.append(`This figure cannot be drawn: ${error.message}`));
  throw error;
});
