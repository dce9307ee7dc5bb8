"use strict";
// Messages over the bars of a chart (chart.js).

const MOST_LINKS = 160; // in view, up to which the messages are drawn without being asked for

// Messages as arrows from where they begin to be sent to where they have been received: those of the event that is
// pointed at or selected, also to and from the line behind which a rank is folded; of a zoom, all between rows, where
// they are few.
function drawLinks(chart) {
  const asked = new Set([chart.selected, chart.hovered].filter((i) => i !== null));
  chart.shown.links = 0;
  if (!asked.size && !chart.times) return;
  const [from, to] = chart.range;
  const { visible } = chart.shown;
  const links = chart.what.links().flatMap(([send, receive]) => {
    const [a, b] = [chart.what.at(send), chart.what.at(receive)];
    return a && b && b.end >= from && a.start <= to ? [{ a, b, strong: asked.has(send) || asked.has(receive) }] : [];
  });
  const inView = ({ a, b }) => !a.folded && !b.folded && Math.max(a.row, b.row) >= visible[0] && Math.min(a.row, b.row) <= visible.at(-1);
  const every = chart.times && links.filter(inView).length <= MOST_LINKS;
  for (const link of links) {
    const { a, b, strong } = link;
    if (strong || (every && inView(link))) drawLink(chart, chart.x(a.start), chart.middle(a.row), chart.x(b.end), chart.middle(b.row), strong);
  }
}

function drawLink(chart, x, y, toX, toY, strong) {
  const { context } = chart;
  const angle = Math.atan2(toY - y, toX - x);
  chart.shown.links++;
  context.strokeStyle = context.fillStyle = chart.colour("--text");
  context.globalAlpha = strong ? 1 : 0.45;
  context.lineWidth = strong ? 2 : 1;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
  context.beginPath();
  context.moveTo(toX, toY);
  for (const side of [-0.4, 0.4]) context.lineTo(toX - 8 * Math.cos(angle + side), toY - 8 * Math.sin(angle + side));
  context.fill();
  context.globalAlpha = 1;
}
