"use strict";
// What the wheel, the pointer and the keyboard do on a chart (chart.js). A wheel alone scrolls, as everywhere.

const DRAG = 4; // pixels, from which a press is a drag

function listen(chart) {
  const { box, canvas } = chart;
  const offset = (event) => {
    const seen = canvas.getBoundingClientRect();
    return [event.clientX - seen.left, event.clientY - seen.top];
  };
  let pressed = null; // {x, ruler}

  box.addEventListener(
    "wheel",
    (event) => {
      const across = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
      if (event.ctrlKey || event.metaKey) chart.zoom(Math.exp(clamp(event.deltaY, -200, 200) / 400), chart.time(offset(event)[0]));
      else if (across) chart.pan(across / 1000);
      else return;
      event.preventDefault();
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = offset(event);
    if (event.button || x < chart.left) return;
    pressed = { x, ruler: event.shiftKey };
    if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = offset(event);
    if (chart.pinched) return;
    if (!pressed) return point(chart, x, y);
    if (Math.abs(x - pressed.x) < DRAG) return;
    const [from, to] = chart.range;
    const span = [pressed.x, x].map((at) => clamp(chart.time(at), from, to));
    chart[pressed.ruler ? "ruler" : "dragged"] = span;
    chart.note.hidden = true;
    chart.redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    const span = chart.dragged;
    const [x, y] = offset(event);
    const ruled = pressed?.ruler && Math.abs(x - pressed.x) >= DRAG;
    pressed = chart.dragged = null;
    if (chart.pinched) return;
    if (span) return chart.show(span.sort((a, b) => a - b));
    if (ruled) return;
    chart.ruler = null;
    const found = chart.point(x, y);
    if (found && chart.rows[found.row].fold) chart.what.toggle(found.row);
    else chart.select(found?.bar?.count === 1 ? found.bar.i : null);
  });
  canvas.addEventListener("pointercancel", () => {
    pressed = chart.dragged = null;
    chart.redraw();
  });
  canvas.addEventListener("pointerleave", () => point(chart, -1, -1));
  canvas.addEventListener("dblclick", () => chart.show(null));
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (chart.selected === null && ["ArrowUp", "ArrowDown", "Enter"].includes(event.key)) return; // the arrows scroll
    const keys = {
      "+": () => chart.zoom(1 / FARTHER),
      "=": () => chart.zoom(1 / FARTHER),
      "-": () => chart.zoom(FARTHER),
      ArrowLeft: () => chart.pan(-0.2),
      ArrowRight: () => chart.pan(0.2),
      0: () => chart.show(null),
      m: () => chart.measureView(),
      Escape: () => {
        chart.ruler = null;
        chart.select(null);
      },
      ".": () => step(chart, 1),
      ",": () => step(chart, -1),
      ArrowUp: () => stepRow(chart, -1),
      ArrowDown: () => stepRow(chart, 1),
      Enter: () => chart.what.toggle(chart.what.at(chart.selected).row),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// Shows what lies under the pointer.
function point(chart, x, y) {
  const found = chart.point(x, y);
  const lines = found && found.time !== null ? chart.what.tip(found) : [];
  const hovered = found?.bar?.count === 1 ? found.bar.i : null;
  if (hovered !== chart.hovered) chart.redraw();
  chart.hovered = hovered;
  chart.canvas.style.cursor = found && chart.rows[found.row].fold ? "pointer" : "";
  showNote(chart, lines, x, y);
}

function showNote(chart, lines, x, y) {
  chart.note.hidden = !lines.length;
  chart.note.replaceChildren(
    ...lines.map((text, index) => Object.assign(document.createElement(index ? "div" : "b"), { textContent: text })),
  );
  const place = (at, size, room) => `${clamp(at + 14 + size > room ? at - size - 14 : at + 14, 0, Math.max(room - size, 0))}px`;
  chart.note.style.left = place(x, chart.note.offsetWidth, chart.place.clientWidth);
  chart.note.style.top = place(y, chart.note.offsetHeight, chart.below + 60);
}

// Selects the event before or after the selected one.
function step(chart, by) {
  const next = chart.what.neighbour(chart.selected, by);
  if (next !== undefined) go(chart, next);
}

// Selects, in the next row up or down that has any, the event that begins nearest to the selected one.
function stepRow(chart, by) {
  const { row, start } = chart.what.at(chart.selected);
  const away = (bar) => Math.abs(bar.start - start);
  for (let next = row + by; next >= 0 && next < chart.rows.length; next += by) {
    const bars = chart.what.find(0, chart.length, next, next);
    if (bars.length) return go(chart, bars.reduce((a, b) => (away(b) < away(a) ? b : a)).i);
  }
}

// Selects an event, brings it into view and says what it is.
function go(chart, i) {
  const { row, start, end } = chart.what.at(i);
  const [from, to] = chart.range;
  if (start < from || end > to) chart.show([(start + end - to + from) / 2, (start + end + to - from) / 2]);
  chart.uncover(row);
  chart.select(i);
  chart.draw();
  const bar = chart.shown.bars.find((one) => one.i === i) ?? { i, row, start, end, wait: chart.what.events.waiting?.[i] ?? -1, count: 1 };
  showNote(chart, chart.what.tip({ row, time: start, bar }), clamp(chart.x(start), chart.left, chart.left + chart.wide), chart.middle(row));
}
