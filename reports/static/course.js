"use strict";
// Charts one above the other over one x axis. What they show is in #course-data (reports/figures/course.py):
//
//   places   lists of iterations
//   axes     what the x axis may be: name, and, but for the first, the iterations themselves, `at` (which of the lists
//            has its iterations) and y (its values there)
//   before   the same of an earlier run, for the lines of that kind
//   charts   key, title, zero (whether its axis begins there) and lines: name, kind (dots, faint, before), `at`, y with null
//            where a value is not finite, lost (how many are not, and the first's iteration), and of a line too long to
//            be drawn whole, means of `each` values one after the other
//   layout   of Plotly, and the colours `series` and `soft`
//
// What the reader chooses lasts as long as the tab, for a page may load itself anew.

const CHART_PIXELS = 84;
const HEAD_PIXELS = 32;
const ROW_PIXELS = 20; // more of a head on a phone, for each line of a chart that has several
const FOOT_PIXELS = 44;
const SIDES = { l: 58, r: 14 };
const MANY_CHARTS = 24; // of more the rest is drawn when it is ticked
const KEPT = `tdpp-course ${location.pathname}`;
const part = (name) => document.getElementById(`course-${name}`);

const course = {
  data: null,
  chosen: { x: "iteration", smoothing: 0, logX: false, logY: false, off: [], on: [], between: null },

  get axis() {
    return Math.max(this.data.axes.findIndex((axis) => axis.name === this.chosen.x), 0);
  },

  // Whether a chart is drawn.
  shows(chart, number) {
    const { on, off } = this.chosen;
    return number < MANY_CHARTS ? !off.includes(chart.key) : on.includes(chart.key);
  },

  get charts() {
    return this.data.charts.filter((chart, number) => this.shows(chart, number));
  },

  get narrow() {
    return document.getElementById("course").clientWidth < 560;
  },

  // Where each chart's head begins, in pixels, and where the last chart ends.
  get tops() {
    const { narrow } = this;
    const head = (chart) => HEAD_PIXELS + (narrow && chart.lines.length > 1 ? ROW_PIXELS * chart.lines.length : 0);
    return this.charts.reduce((tops, chart) => [...tops, tops.at(-1) + head(chart) + CHART_PIXELS], [0]);
  },

  // From an iteration to the chosen x, and back; null where it is not known.
  x(iteration, kind) {
    if (!this.axis) return iteration;
    const own = this.data.axes[this.axis];
    const axis = kind === "before" ? this.data.before.find(({ name }) => name === own.name) : own;
    return axis ? between(this.data.places[axis.at], axis.y, iteration) : null;
  },

  iteration(x) {
    const { at, y } = this.data.axes[this.axis];
    return this.axis ? between(y, this.data.places[at], Math.min(Math.max(x, y[0]), y.at(-1))) : x;
  },

  // Draws everything anew, after a choice or with new data.
  async draw() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.chosen));
    } catch {} // a browser may keep nothing of files
    const place = document.querySelector(".plot.course");
    if (place) await drawFigure(place);
    if (!place?.isConnected) return; // a live page has put something else in its place
    drawHeads();
    cursor.draw();
  },

  // With newer data, on a page that follows its run.
  update(data) {
    this.data = data;
    fillControls();
    return this.draw();
  },
};

// Of rising numbers xs and their ys, y at x: on the straight line between its neighbours; null outside.
function between(xs, ys, x) {
  let [low, high] = [0, xs.length - 1];
  if (!xs.length || x < xs[low] || x > xs[high]) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  if (x >= xs[high]) return ys[high];
  return xs[high] === xs[low] ? ys[low] : ys[low] + ((x - xs[low]) / (xs[high] - xs[low])) * (ys[high] - ys[low]);
}

// An exponential mean, without the weight of a start at 0: of equal values it is that value from the first on.
function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    [sum, mass] = [weight * sum + (1 - weight) * value, weight * mass + (1 - weight)];
    return sum / mass;
  });
}

// Colour of a line among those of its chart.
function colourOf(line, number) {
  return line.kind === "faint" || line.kind === "before" ? course.data.soft : course.data.series[number % course.data.series.length];
}

// What a line's smoothing gives: iterations and values.
function smoothLine(line) {
  const { at, y, each } = { each: 1, ...(line.means ?? line) };
  return { at, y: smoothed(y, course.chosen.smoothing ** each) };
}

// Whether a chart's axis is logarithmic: where it is wanted, and half of the values or more are above 0.
function isLog(chart) {
  if (!course.chosen.logY) return false;
  const known = chart.lines.flatMap((line) => line.y).filter((y) => y !== null);
  return 2 * known.filter((y) => y > 0).length >= known.length;
}

function tracesOf(chart, number) {
  const log = isLog(chart);
  const smooth = course.chosen.smoothing > 0;
  const trace = ({ at, y, kind }, style) => ({
    type: "scatter", hoverinfo: "skip", xaxis: "x", yaxis: number ? `y${number + 1}` : "y",
    x: course.data.places[at].map((iteration) => course.x(iteration, kind)), y: log ? y.map((one) => (one > 0 ? one : null)) : y, ...style,
  });
  return chart.lines.flatMap((line, index) => {
    const color = colourOf(line, index);
    const faint = line.kind === "faint" || line.kind === "before";
    const style = { mode: line.kind === "dots" ? "markers" : line.y.length > 400 ? "lines" : "lines+markers", marker: { size: 3.5, color }, line: { width: 1.6, color, dash: { faint: "dash", before: "dot" }[line.kind] ?? "solid" } };
    if (!smooth || faint || line.kind === "dots") return [trace(line, style)];
    return [trace(line, { ...style, opacity: 0.3 }), trace(smoothLine(line), { mode: "lines", line: { width: 2, color } })];
  });
}

// Data and layout of the whole, for drawFigure.
function courseFigure() {
  const { charts, data, chosen } = course;
  const { tops } = course;
  const height = Math.max(tops.at(-1), CHART_PIXELS);
  document.querySelector(".plot.course").style.height = `${height + FOOT_PIXELS}px`; // which Plotly takes after a resize
  const layout = { ...data.layout, height: height + FOOT_PIXELS, margin: { ...SIDES, t: 0, b: FOOT_PIXELS }, dragmode: "zoom" };
  layout.xaxis = { title: { text: data.axes[course.axis].name }, type: chosen.logX ? "log" : "linear", anchor: charts.length > 1 ? `y${charts.length}` : "y" };
  const ends = chosen.between?.map((iteration) => course.x(iteration) ?? (iteration <= chosen.between[0] ? lowest() : highest()));
  if (ends && !ends.includes(undefined) && (!chosen.logX || ends[0] > 0)) layout.xaxis.range = chosen.logX ? ends.map(Math.log10) : ends;
  charts.forEach((chart, number) => {
    const bottom = 1 - tops[number + 1] / height;
    layout[number ? `yaxis${number + 1}` : "yaxis"] = {
      domain: [Math.max(bottom, 0), bottom + CHART_PIXELS / height], fixedrange: true, nticks: 4, exponentformat: "power", anchor: "x",
      type: isLog(chart) ? "log" : "linear", rangemode: chart.zero ? "tozero" : "normal",
    };
  });
  return { data: charts.flatMap(tracesOf), layout };
}

// The ends of the chosen axis.
const lowest = () => (course.axis ? course.data.axes[course.axis].y[0] : undefined);
const highest = () => (course.axis ? course.data.axes[course.axis].y.at(-1) : undefined);

// What stands above each chart: its title, its lines, what is not drawn, and the values at the cursor.
function drawHeads() {
  const figure = document.getElementById("course");
  figure.querySelectorAll(".head").forEach((one) => one.remove());
  const { charts, tops } = course;
  charts.forEach((chart, number) => {
    const head = Object.assign(document.createElement("div"), { className: chart.lines.length > 1 ? "head several" : "head" });
    const title = Object.assign(document.createElement("b"), { textContent: chart.title, title: chart.key });
    head.append(title);
    Object.assign(head.style, { top: `${tops[number]}px`, height: `${tops[number + 1] - tops[number] - CHART_PIXELS}px` });
    chart.lines.forEach((line, index) => {
      const shown = Object.assign(document.createElement("span"), { className: `line ${line.kind}` });
      shown.style.setProperty("--line-colour", themed(colourOf(line, index)));
      shown.append(Object.assign(document.createElement("span"), { textContent: chart.lines.length > 1 ? line.name : "" }), document.createElement("output"));
      head.append(shown);
    });
    const said = notes(chart);
    if (said) head.append(Object.assign(document.createElement("small"), { textContent: said, title: said }));
    figure.append(head);
  });
}

function notes(chart) {
  const lost = chart.lines.filter((line) => line.lost).map(({ lost: [count, first] }) => `not finite in ${count} line${count > 1 ? "s" : ""}, first in iteration ${first}`);
  const below = isLog(chart) ? chart.lines.flatMap((line) => line.y).filter((y) => y !== null && y <= 0).length : 0;
  if (below) lost.push(`${below} of 0 or less not drawn`);
  if (course.chosen.logY && !isLog(chart)) lost.push("linear: most are 0 or less");
  return lost.join("; ");
}

// Choices and ranges of the controls, which are there already.
function fillControls() {
  const { data, chosen } = course;
  part("x").replaceChildren(...data.axes.map(({ name }) => new Option(name === "iteration" ? "iterations" : name, name, false, name === data.axes[course.axis].name)));
  part("smoothing").value = chosen.smoothing;
  part("smoothing").nextElementSibling.textContent = chosen.smoothing.toFixed(2);
  part("log-x").checked = chosen.logX;
  part("log-y").checked = chosen.logY;
  part("whole").disabled = chosen.between === null;
  const [said, list] = part("choice").children;
  said.textContent = `Charts: ${course.charts.length} of ${data.charts.length}`;
  const keys = JSON.stringify(data.charts.map(({ key }) => key));
  if (list.dataset.keys === keys) return;
  list.dataset.keys = keys;
  list.replaceChildren(...data.charts.map((chart, number) => {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: course.shows(chart, number) });
    box.addEventListener("change", () => {
      const kept = (keys, wanted) => [...keys.filter((key) => key !== chart.key), ...(wanted ? [chart.key] : [])];
      choose({ on: kept(chosen.on, box.checked), off: kept(chosen.off, !box.checked) });
    });
    label.append(box, ` ${chart.title}`);
    return label;
  }));
}

function choose(changes) {
  Object.assign(course.chosen, changes);
  fillControls();
  return course.draw();
}

function beginCourse() {
  course.data = JSON.parse(part("data").textContent);
  try {
    Object.assign(course.chosen, JSON.parse(sessionStorage.getItem(KEPT) ?? "{}"));
  } catch {} // as above
  fillControls();
  part("x").addEventListener("change", ({ target }) => choose({ x: target.value }));
  part("smoothing").addEventListener("input", ({ target }) => choose({ smoothing: Number(target.value) }));
  part("log-x").addEventListener("change", ({ target }) => choose({ logX: target.checked }));
  part("log-y").addEventListener("change", ({ target }) => choose({ logY: target.checked }));
  part("whole").addEventListener("click", () => choose({ between: null }));
  const place = document.querySelector(".plot.course");
  place.figure = courseFigure;
  place.drawn = () => {
    drawHeads();
    cursor.begin(place);
    let { narrow } = course;
    new ResizeObserver(() => {
      if (narrow === course.narrow) return;
      ({ narrow } = course);
      course.draw();
    }).observe(place);
    place.on("plotly_relayout", (changed) => {
      const ends = changed["xaxis.range"] ?? [changed["xaxis.range[0]"], changed["xaxis.range[1]"]];
      if (changed["xaxis.autorange"]) choose({ between: null });
      else if (ends.every((end) => end !== undefined)) choose({ between: ends.map((end) => course.iteration(course.chosen.logX ? 10 ** end : end)) });
    });
  };
}

if (part("data")) beginCourse();
