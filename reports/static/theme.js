"use strict";
// What all figures of a page share, from reports/figures: Plotly's configuration, and colours for day and night.

const PLOTLY = JSON.parse(document.getElementById("plotly").textContent);

// The same with every colour that has a counterpart by night replaced by what the style sheet says now.
function themed(value, css = getComputedStyle(document.documentElement)) {
  if (typeof value === "string") return Object.hasOwn(PLOTLY.themed, value) ? css.getPropertyValue(PLOTLY.themed[value]).trim() : value;
  if (Array.isArray(value)) return value.map((one) => themed(one, css));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one, css)]));
}
