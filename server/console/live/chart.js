/* A small chart of a few series over time, with the latest values as text. */

import {h, svg} from "../core/dom.js";

const [WIDTH, HEIGHT] = [300, 96];
const GAP_S = 20;  // no line joins samples that are further apart

export class Chart {
  /* `series`: names. `format`: formats a value. `top`: the smallest upper end of the axis. */
  constructor(title, series, {format, top}) {
    this.title = title;
    this.format = format;
    this.least = top;
    this.values = series.map(() => h("strong", {class: "number"}, "–"));
    this.paths = series.map((_, at) => svg("path", {class: `line series-${at + 1}`, d: ""}));
    this.cursor = svg("line", {class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden"});
    this.top = h("span", {class: "top number"});
    this.when = h("span", {class: "when number"});
    this.picture = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img"},
      ...[0.5, HEIGHT / 2, HEIGHT - 0.5].map(y => svg("line", {class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y})), ...this.paths, this.cursor);
    this.picture.addEventListener("pointermove", event => this.#point(event));
    this.picture.addEventListener("pointerleave", () => this.#point(null));
    this.element = h("section", {class: "chart", "aria-label": title},
      h("header", {}, h("h2", {}, title), this.when),
      h("dl", {class: "legend"}, series.map((name, at) => h("div", {}, h("dt", {}, h("i", {class: `series-${at + 1}`}), name), h("dd", {}, this.values[at])))),
      h("div", {class: "plot"}, this.top, this.picture));
    this.at = null;  // index of the sample under the pointer
  }

  /* `lines`: for each series a list of values, null where a value is missing. `times`: in seconds. `span`: the width of the chart in seconds. */
  update(lines, times, span) {
    const end = times.at(-1), first = times.findIndex(time => end - time <= span);
    this.lines = lines.map(line => line.slice(first));
    this.times = times.slice(first);
    const most = Math.max(this.least, ...this.lines.flat().filter(value => value !== null));
    this.scale = niceTop(most);
    this.x = time => WIDTH * (1 - (end - time) / span);
    this.top.textContent = this.format(this.scale);
    this.lines.forEach((line, at) => this.paths[at].setAttribute("d", this.#outline(line)));
    this.#showValues();
  }

  #outline(line) {
    let text = "", isDrawing = false;
    line.forEach((value, at) => {
      if (this.times[at] - this.times[at - 1] > GAP_S) isDrawing = false;
      if (value !== null) text += `${isDrawing ? "L" : "M"}${this.x(this.times[at]).toFixed(1)} ${(HEIGHT - 1 - (HEIGHT - 2) * value / this.scale).toFixed(1)}`;
      isDrawing = value !== null;
    });
    return text;
  }

  #point(event) {
    const box = this.picture.getBoundingClientRect();
    this.at = null;
    if (event && this.times?.length) {
      const x = WIDTH * (event.clientX - box.x) / box.width, distances = this.times.map(time => Math.abs(this.x(time) - x));
      this.at = distances.indexOf(Math.min(...distances));
    }
    this.#showValues();
  }

  #showValues() {
    if (!this.times) return;
    const at = this.at === null ? this.times.length - 1 : Math.min(this.at, this.times.length - 1), ago = Math.round(this.times.at(-1) - this.times[at]);
    const shown = this.lines.map(line => line[at] === null || line[at] === undefined ? "–" : this.format(line[at]));
    shown.forEach((text, series) => { this.values[series].textContent = text; });
    this.when.textContent = ago >= 120 ? `${Math.round(ago / 60)} min ago` : ago ? `${ago} s ago` : "";
    this.picture.setAttribute("aria-label", `${this.title}: now ${shown.join(", ")}; the axis ends at ${this.format(this.scale)}`);
    this.cursor.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    const x = this.x(this.times[at]).toFixed(1);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }
}

/* Return the smallest number of …, 1, 2, 5, 10, 20, … that is at least the value. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= value * 0.999999);
}
