"use strict";
// The cursor over all charts of a course: at a logged iteration, with the values of every line there. The pointer moves
// it, and so does a slider, with + and - to zoom and 0 to see everything.

// A number as people read it, to six digits.
function figured(value) {
  const short = Number(value.toPrecision(6));
  return short !== 0 && (Math.abs(short) < 1e-3 || Math.abs(short) >= 1e9) ? short.toExponential().replace("e+", "e") : short.toLocaleString("en", { maximumSignificantDigits: 6 });
}

// Hours in the unit that fits, to four digits.
function spanned(hours) {
  const [size, unit] = hours < 1 / 30 ? [3600, "s"] : hours < 2 ? [60, "min"] : [1, "hours"];
  return `${figured(Number((hours * size).toPrecision(4)))} ${unit}`;
}

const cursor = {
  iteration: null, // null: nowhere
  stops: [], // iterations of all points that are drawn

  begin(place) {
    this.place = place;
    this.mark = Object.assign(document.createElement("div"), { className: "cursor", hidden: true });
    place.parentElement.append(this.mark);
    const follow = ({ clientX }) => {
      const axis = place._fullLayout.xaxis;
      const x = axis.p2d(clientX - place.getBoundingClientRect().left - axis._offset);
      this.show(nearest(this.stops, course.iteration(x)));
    };
    place.addEventListener("pointermove", follow);
    place.addEventListener("pointerdown", follow);
    const slider = part("cursor");
    slider.addEventListener("input", () => this.show(this.stops[Number(slider.value)]));
    slider.addEventListener("focus", () => this.iteration ?? this.show(this.stops[Number(slider.value)]));
    slider.addEventListener("keydown", (event) => {
      const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      if (event.key === "0") choose({ between: null });
      else if (!factor) return;
      else this.zoom(factor);
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(place); // Plotly has its own, and draws later
    place.on("plotly_afterplot", () => this.draw());
    this.draw();
  },

  // By a factor of what is shown, around the cursor.
  zoom(factor) {
    const [first, last] = [this.stops[0], this.stops.at(-1)];
    const [from, to] = course.chosen.between ?? [first, last];
    const around = this.iteration ?? (from + to) / 2;
    const ends = [Math.max(around - (around - from) * factor, first), Math.min(around + (to - around) * factor, last)];
    if (ends[1] > ends[0]) choose({ between: ends[0] <= first && ends[1] >= last ? null : ends });
  },

  show(iteration) {
    this.iteration = iteration ?? null;
    this.draw();
  },

  draw() {
    if (!this.place?.isConnected) return; // an observer still tells of a course that has gone
    const slider = part("cursor");
    this.stops = [...new Set(course.charts.flatMap((chart) => chart.lines.flatMap((line) => course.data.places[line.at])))].sort((a, b) => a - b);
    slider.max = Math.max(this.stops.length - 1, 0);
    slider.disabled = !this.stops.length;
    const x = this.iteration === null ? null : course.x(this.iteration);
    const axis = this.place._fullLayout.xaxis;
    const at = x === null ? NaN : axis.d2p(x);
    this.mark.hidden = !(at >= 0 && at <= axis._length);
    this.mark.style.left = `${axis._offset + at}px`;
    this.mark.style.height = `${course.tops.at(-1)}px`;
    if (this.iteration === null) return;
    slider.value = nearestIndex(this.stops, this.iteration);
    const said = this.read();
    const where = `iteration ${this.iteration.toLocaleString("en")}${this.spent()}`;
    part("at").textContent = where;
    slider.setAttribute("aria-valuetext", `${where}; ${said.join("; ")}`);
  },

  // Writes the values of all lines there, of one that has none the last before; returns them with their charts.
  read() {
    const heads = document.querySelectorAll("#course .head");
    return course.charts.flatMap((chart, number) => {
      const texts = chart.lines.map((line) => this.valueOf(line));
      heads[number]?.querySelectorAll("output").forEach((place, index) => (place.textContent = texts[index]));
      return texts.map((text, index) => `${chart.title}${chart.lines.length > 1 ? `, ${chart.lines[index].name}` : ""} ${text}`);
    });
  },

  valueOf(line) {
    const iterations = course.data.places[line.at];
    const index = indexBefore(iterations, this.iteration);
    if (index < 0) return "–";
    const value = line.y[index] === null ? "not finite" : figured(line.y[index]);
    const text = iterations[index] === this.iteration || line.kind === "faint" ? value : `${value} (at ${iterations[index]})`;
    if (!course.chosen.smoothing || line.kind) return text;
    const smooth = smoothLine(line);
    const there = smooth.y[Math.max(indexBefore(course.data.places[smooth.at], this.iteration), 0)];
    return there === null ? text : `${text}, smoothed ${figured(there)}`;
  },

  // What the iteration is on the other axes.
  spent() {
    return course.data.axes.slice(1).map(({ name, at, y }) => {
      const value = between(course.data.places[at], y, this.iteration);
      if (value === null) return "";
      return ` · ${name === "dollars" ? `$${figured(value)}` : name === "hours" ? spanned(value) : `${figured(value)} ${name}`}`;
    }).join("");
  },
};

// The place of the last of rising numbers that is not above one; -1 without any.
function indexBefore(numbers, one) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= one) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearestIndex(numbers, one) {
  const before = Math.max(indexBefore(numbers, one), 0);
  return before + 1 < numbers.length && numbers[before + 1] - one < one - numbers[before] ? before + 1 : before;
}

const nearest = (numbers, one) => numbers[nearestIndex(numbers, one)];
