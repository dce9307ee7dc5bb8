"use strict";
// Rows of bars over time, on a canvas that stays in place while its rows scroll below the axis of times. The page
// gives `what`:
//
//   names, events, microBatches   of the tasks; of each event i its name and micro_batch; how many shades there are
//   find(from, to, first, last)   the bars that lie in these times (ns) and rows; beside, where they are of another iteration
//   at(i)                         row, start and end of an event on this chart; undefined where it has none; folded,
//                                 where its row is the line behind which it is folded
//   links()                       messages between rows as pairs of events [send, receive]
//   tip(point)                    lines of text about {row, time, bar}; bar is null where there is none
//   neighbour(i, step)            the event of the same row before (-1) or after (1) an event; of null, the first
//   changed()                     called when the user has changed the times, the selection, or what rows are in view
//   toggle(row)                   called when the user wants to fold or unfold what is like the ranks around a row
//
// and sets `rows` ({label, short, stage, predicted, share, fold}), `length` (ns) and, for a part of it, `times`.
//
// An overlay is a function (context, chart) in `chart.overlays`. It is called after every drawing of the bars, clipped
// to their area, and has chart.x(ns), chart.middle(row), chart.height(row) and what.at(i) to find its places.

const AXIS = 24; // pixels of the axis of times
const SHARE = 62; // of the column of shares, on the right
const ROW_PIXELS = [10, 56]; // least and most
const FOLD_PIXELS = 20;
const ROW_FOR_NUMBERS = 30; // from which a bar has room for the number of its micro-batch
const ROW_FOR_LABEL = 13;
const SHORTEST = 1000; // ns that can be zoomed to
const FARTHER = 1.25; // what a key zooms by
const BESIDE = 0.4; // opacity of events of other iterations

class Chart {
  constructor(place, what) {
    const made = (name, kind) => Object.assign(document.createElement(name), { className: kind });
    Object.assign(this, { place, what, rows: [], length: 1, times: null, overlays: [], selected: null, hovered: null });
    Object.assign(this, { ruler: null, dragged: null, pinched: false, drawn: 0, pending: false, shown: { bars: [], found: 0 } });
    this.box = made("div", "rows");
    this.canvas = made("canvas", "");
    this.rest = made("div", "rest");
    this.note = made("div", "tip");
    this.note.hidden = true;
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "application");
    this.box.setAttribute("aria-label", "Timeline. Plus and minus zoom, left and right arrows pan, 0 shows everything, m measures what is in view, full stop and comma step through the events of a row, up and down arrows lead to other rows, Enter folds and unfolds.");
    this.box.append(this.canvas, this.rest);
    place.classList.add("timeline");
    this.tools = made("div", "tools");
    this.tool("+", "Zoom in", () => this.zoom(1 / FARTHER ** 2));
    this.tool("−", "Zoom out", () => this.zoom(FARTHER ** 2));
    this.tool("Show all", "Show the whole iteration", () => this.show(null));
    place.replaceChildren(this.tools, this.box, this.note);
    this.context = this.canvas.getContext("2d");
    this.box.addEventListener("scroll", () => {
      this.redraw();
      what.changed();
    });
    let width = 0;
    new ResizeObserver(() => {
      if (width !== place.clientWidth) this.redraw();
      width = place.clientWidth;
    }).observe(place);
    addEventListener("resize", () => this.redraw());
    for (const event of ["beforeprint", "afterprint"]) addEventListener(event, () => this.draw());
    listen(this);
    listenToFingers(this);
  }

  get range() {
    return this.times ?? [0, this.length];
  }

  x(time) {
    const [from, to] = this.range;
    return this.left + ((time - from) / (to - from)) * this.wide;
  }

  time(x) {
    const [from, to] = this.range;
    return from + ((x - this.left) / this.wide) * (to - from);
  }

  top(row) {
    return AXIS + this.tops[row] - this.box.scrollTop;
  }

  height(row) {
    return this.tops[row + 1] - this.tops[row];
  }

  middle(row) {
    return this.top(row) + this.height(row) / 2;
  }

  // Left, top, width and height of a place in a row (reports/figures/tasks.py) between two times.
  area(row, start, end, place) {
    const x = this.x(start);
    const height = this.height(row);
    const top = this.top(row) + (place.top + 0.5) * height;
    return [x, top, Math.max(this.x(end) - x, 1), Math.max((place.bottom - place.top) * height, 1)];
  }

  // Shows these times from now on; without any all.
  show(times) {
    if (times) {
      const span = clamp(times[1] - times[0], SHORTEST, this.length);
      const from = clamp(times[0], 0, this.length - span);
      this.times = span < this.length ? [from, from + span] : null;
    } else this.times = null;
    this.what.changed();
    this.redraw();
  }

  // Scrolls to a row that is not wholly in view.
  uncover(row) {
    if (this.top(row) < AXIS || this.top(row + 1) > this.below) this.box.scrollTop = this.tops[row];
  }

  // A button above the rows.
  tool(text, name, act) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, title: name });
    button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    this.tools.append(button);
  }

  // By a factor of the time that is shown, around a time: without one the middle of the selected event, if it is in view,
  // or else of the times.
  zoom(factor, around = this.middleTime()) {
    const [from, to] = this.range;
    const span = clamp((to - from) * factor, SHORTEST, this.length);
    this.show(this.keeping(around - ((around - from) * span) / (to - from), span));
  }

  // Where the selected event lies, if any of it is in view.
  selectedInView() {
    const place = this.selected === null ? undefined : this.what.at(this.selected);
    const [from, to] = this.range;
    return place && place.end >= from && place.start <= to ? place : undefined;
  }

  middleTime() {
    const [from, to] = this.range;
    const { start, end } = this.selectedInView() ?? { start: from, end: to };
    return (Math.max(start, from) + Math.min(end, to)) / 2;
  }

  // Times of this span from about `from` on, in which a selected event stays in view: whole, or filling it.
  keeping(from, span) {
    const { start, end } = this.selectedInView() ?? { start: from, end: from + span };
    const begin = clamp(from, Math.min(start, end - span), Math.max(start, end - span));
    return [begin, begin + span];
  }

  pan(share) {
    const [from, to] = this.range;
    this.show([from + share * (to - from), to + share * (to - from)]);
  }

  // Measures what is in view; ends the measurement, if there is one.
  measureView() {
    this.ruler = this.ruler ? null : [...this.range];
    this.redraw();
  }

  select(i) {
    this.selected = i;
    this.what.changed();
    this.redraw();
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const css = getComputedStyle(document.documentElement);
    this.colour = (name) => css.getPropertyValue(name).trim();
    if (!this.box.clientWidth || !this.what.events) return; // hidden, or nothing is read yet
    this.measure();
    const [from, to] = this.range;
    const visible = this.rows.flatMap((_, row) => (this.top(row) < this.below && this.top(row + 1) > AXIS ? [row] : []));
    const found = visible.length ? this.what.find(from, to, visible[0], visible.at(-1)) : [];
    this.shown = { bars: merged(found, (to - from) / this.wide, this.what.events.name), found: found.length, visible };
    const { context } = this;
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.clipped(0, () => this.drawRows(visible));
    drawAxis(this);
    this.clipped(this.left, () => {
      this.drawBars();
      drawLinks(this);
      for (const overlay of this.overlays) overlay(context, this);
      this.drawSelected();
      this.drawSpans();
    });
    this.place.dataset.drawn = ++this.drawn;
    this.what.said?.();
  }

  // Sets the sizes of all parts for the width and height that there is.
  measure() {
    const width = this.box.clientWidth;
    const folds = this.rows.filter((row) => row.fold).length;
    const every = AXIS + folds * FOLD_PIXELS + (this.rows.length - folds) * ROW_PIXELS[0]; // paper does not scroll
    const most = Math.max(innerHeight - 150, 240, document.documentElement.hasAttribute("data-printing") ? every : 0);
    const fits = (most - AXIS - folds * FOLD_PIXELS) / Math.max(this.rows.length - folds, 1);
    const pixels = Math.floor(clamp(fits, ...ROW_PIXELS));
    this.tops = [0];
    for (const row of this.rows) this.tops.push(this.tops.at(-1) + (row.fold ? FOLD_PIXELS : pixels));
    this.below = Math.min(AXIS + this.tops.at(-1), most);
    this.box.style.height = `${this.below}px`;
    this.rest.style.height = `${AXIS + this.tops.at(-1) - this.below}px`;
    this.left = parseFloat(this.colour("--labels"));
    this.narrow = this.left < 150;
    this.share = this.rows.some((row) => row.share !== undefined) ? (this.narrow ? 40 : SHARE) : 8;
    this.wide = Math.max(width - this.left - this.share, 50);
    const ratio = devicePixelRatio || 1;
    const [across, down] = [Math.round(width * ratio), Math.round(this.below * ratio)];
    if (this.canvas.width !== across || this.canvas.height !== down) {
      Object.assign(this.canvas, { width: across, height: down });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${this.below}px` });
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  clipped(left, drawing) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(left, AXIS, left ? this.wide : this.box.clientWidth, this.below - AXIS);
    context.clip();
    drawing();
    context.restore();
  }

  // What lies behind the bars: labels, bands of stages, shares, and the text of folded rows.
  drawRows(visible) {
    const { context } = this;
    const width = this.box.clientWidth;
    let written = -Infinity;
    for (const row of visible) {
      const one = this.rows[row];
      const [top, height] = [this.top(row), this.height(row)];
      if (one.stage % 2 || one.predicted) {
        context.fillStyle = this.colour(one.predicted ? "--predicted" : "--band");
        context.fillRect(this.left, top, width - this.left, height);
      }
      if (row && one.stage !== this.rows[row - 1].stage) {
        context.fillStyle = this.colour("--border");
        context.fillRect(0, top, width, 1);
      }
      context.textBaseline = "middle";
      if (one.fold) {
        context.font = "12px system-ui, sans-serif";
        context.textAlign = "left";
        context.fillStyle = this.colour("--link");
        context.fillText(this.narrow ? one.short : one.fold, 6, top + height / 2, width - 12);
        written = top;
        continue;
      }
      if (top - written < ROW_FOR_LABEL && height < ROW_FOR_LABEL) continue;
      written = top;
      context.font = `${height < 16 ? 10 : 12}px system-ui, sans-serif`;
      context.fillStyle = this.colour("--text");
      context.textAlign = "right";
      context.fillText(this.narrow ? one.short : one.label, this.left - 8, top + height / 2, this.left - 10);
      if (one.share === undefined || one.share === null) continue;
      context.fillText(`${digits(100 * one.share, this.narrow ? 0 : 1)}%`, width - 4, top + height / 2);
    }
  }

  drawBars() {
    const { context, what } = this;
    const byName = what.names.map(() => []);
    for (const bar of this.shown.bars) byName[what.events.name[bar.i]].push(bar);
    const waits = [];
    what.names.forEach((name, index) => {
      const style = taskStyle(name);
      const colours = new Map();
      const numbered = name.endsWith("-compute");
      for (const bar of byName[index]) {
        const microBatch = what.events.micro_batch[bar.i];
        if (!colours.has(microBatch)) colours.set(microBatch, shade(name, microBatch, what.microBatches));
        bar.colour = colours.get(microBatch);
        const [x, y, width, height] = (bar.area = this.area(bar.row, bar.start, bar.end, style));
        context.fillStyle = bar.colour;
        if (bar.beside) context.globalAlpha = BESIDE;
        context.fillRect(x, y, width, height);
        if (bar.beside) context.globalAlpha = 1;
        if (bar.wait > 0 && bar.count === 1) waits.push([bar, name, style]);
        if (!numbered || microBatch < 0 || bar.count > 1 || width < 16 || this.height(bar.row) < ROW_FOR_NUMBERS) continue;
        context.font = "10px system-ui, sans-serif";
        context.textAlign = "center";
        context.fillStyle = ink(bar.colour);
        const [seen, end] = [Math.max(x, this.left), Math.min(x + width, this.left + this.wide)];
        if (end - seen > 12) context.fillText(String(microBatch), (seen + end) / 2, y + height / 2 + 0.5);
      }
    });
    // What is waiting inside a task of the computation covers all of it.
    for (const [bar, name, style] of waits) {
      context.fillStyle = hatch(name, context);
      context.globalAlpha = bar.beside ? BESIDE : 1;
      context.fillRect(...this.area(bar.row, bar.start, bar.start + bar.wait, waitingPlace(style)));
      context.globalAlpha = 1;
    }
  }

  drawSelected() {
    const place = this.selected === null ? undefined : this.what.at(this.selected);
    if (!place) return;
    const style = taskStyle(this.what.names[this.what.events.name[this.selected]]);
    const [x, y, width, height] = this.area(place.row, place.start, place.end, style);
    this.context.strokeStyle = this.colour("--text");
    this.context.lineWidth = 2;
    this.context.strokeRect(x - 1, y - 1, width + 2, height + 2);
  }

  // The ruler with its duration, and what is being marked for a zoom.
  drawSpans() {
    const { context } = this;
    for (const [span, name] of [[this.dragged, "--series1"], [this.ruler, "--series2"]]) {
      if (!span) continue;
      const [x, end] = span.map((time) => this.x(time)).sort((a, b) => a - b);
      context.fillStyle = this.colour(name);
      context.globalAlpha = 0.16;
      context.fillRect(x, AXIS, end - x, this.below);
      context.globalAlpha = 1;
      for (const edge of [x, end]) context.fillRect(edge - 0.5, AXIS, 1, this.below);
      const text = `${ms(Math.abs(span[1] - span[0]))} ms`;
      context.font = "600 12px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      const at = clamp((x + end) / 2, this.left + 50, this.left + this.wide - 50);
      const half = context.measureText(text).width / 2 + 6;
      context.fillRect(at - half, AXIS + 4, 2 * half, 20);
      context.fillStyle = this.colour("--raised");
      context.fillText(text, at, AXIS + 14.5);
    }
  }

  // What lies at a point of the canvas; null outside the rows.
  point(x, y) {
    if (y < AXIS || y > this.below || !this.tops) return null;
    const row = this.rows.findIndex((_, index) => y < this.top(index + 1));
    if (row < 0) return null;
    const time = this.time(x);
    if (this.rows[row].fold || x < this.left || x > this.left + this.wide) return { row, time: null, bar: null };
    const order = this.what.events.name;
    const over = ({ row: own, area }) => own === row && x >= area[0] - 0.5 && x <= area[0] + area[2] + 0.5 && y >= area[1] && y <= area[1] + area[3];
    const bar = this.shown.bars.filter(over).reduce((a, b) => (a && order[a.i] > order[b.i] ? a : b), null);
    return { row, time, bar };
  }
}
