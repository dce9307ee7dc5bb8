"use strict";
// Two fingers on a chart (chart.js) zoom it: the time between them stays between them. gestures.js has the rest.

function listenToFingers(chart) {
  let before = null;
  const between = (event) => {
    const [a, b] = event.touches;
    const seen = chart.canvas.getBoundingClientRect();
    return { x: (a.clientX + b.clientX) / 2 - seen.left, apart: Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) };
  };
  const lifted = (event) => {
    before = null;
    if (!event.touches.length) chart.pinched = false;
  };

  chart.canvas.addEventListener(
    "touchstart",
    (event) => {
      if (event.touches.length !== 2) return;
      event.preventDefault();
      before = between(event);
      chart.pinched = true;
      chart.dragged = null; // what the first finger began to mark
      chart.note.hidden = true;
      chart.redraw();
    },
    { passive: false },
  );
  chart.canvas.addEventListener(
    "touchmove",
    (event) => {
      if (!before || event.touches.length !== 2) return;
      event.preventDefault();
      const now = between(event);
      const [from, to] = chart.range;
      const span = clamp((to - from) * (before.apart / Math.max(now.apart, 1)), SHORTEST, chart.length);
      chart.show(chart.keeping(chart.time(before.x) - ((now.x - chart.left) / chart.wide) * span, span));
      before = now;
    },
    { passive: false },
  );
  chart.canvas.addEventListener("touchend", lifted);
  chart.canvas.addEventListener("touchcancel", lifted);
}
