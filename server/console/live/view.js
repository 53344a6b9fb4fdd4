/* The live page: the server's current activity. */

import {askText} from "../core/api.js";
import {find, h} from "../core/dom.js";
import {bytes, count, percent, seconds} from "../core/format.js";
import {pageFault, pageHead} from "../core/page.js";
import {Chart} from "./chart.js";
import {Samples} from "./metrics.js";

const EVERY_MS = 1000;
const MOST = 181;  // samples: three minutes
const SPREAD = 5;  // seconds over which rates are taken
const ALL = "";

/* For each chart: its title, the format of its values, and the series with a function that reads each from the samples. */
const CHARTS = [
  ["Tokens per second", {format: count, top: 10}, {
    generated: (samples, of) => samples.rate("vllm:generation_tokens_total", of),
    "prompt, computed": (samples, of) => samples.rate("vllm:prompt_tokens_by_source_total", {...of, source: "local_compute"}),
  }],
  ["Requests", {format: count, top: 4}, {
    running: (samples, of) => samples.gauge("vllm:num_requests_running", of),
    waiting: (samples, of) => samples.gauge("vllm:num_requests_waiting", of),
  }],
  ["KV pages in use", {format: percent, top: 0.1}, {used: (samples, of) => samples.mean("vllm:kv_cache_usage_perc", of)}],
  ["Time to first token", {format: seconds, top: 0.01}, quantiles("vllm:time_to_first_token_seconds")],
  ["Time between tokens", {format: seconds, top: 0.001}, quantiles("vllm:inter_token_latency_seconds")],
  ["Memory of workers", {format: bytes, top: 1}, {
    own: (samples, of) => samples.gauge("relaxserve:worker_resident_bytes", {...of, kind: "own"}),
    "mapped files": (samples, of) => samples.gauge("relaxserve:worker_resident_bytes", {...of, kind: "mapped"}),
  }],
];

function quantiles(name) {
  return {median: (samples, of) => samples.quantile(name, 0.5, of), "95th": (samples, of) => samples.quantile(name, 0.95, of)};
}

export class LiveView {
  #timer = null;

  constructor(app) {
    this.app = app;
    this.root = find("#live");
    this.samples = new Samples(MOST, SPREAD);
    this.charts = CHARTS.map(([title, looks, series]) => ({chart: new Chart(title, Object.keys(series), looks), series: Object.values(series)}));
    this.models = h("select", {class: "quiet", "aria-label": "Model", onchange: () => this.#draw()}, new Option("All models", ALL));
    this.trouble = h("div");
    this.grid = h("div", {class: "charts"}, this.charts.map(({chart}) => chart.element));
    this.root.append(pageHead("Live", this.models), h("div", {class: "body"}, this.trouble, this.grid,
      h("p", {class: "faint small"}, "The last three minutes; rates and quantiles are of the last five seconds. The figures come from ", h("code", {}, "/metrics"), ", which Prometheus reads, too.")));
  }

  enter() {
    clearTimeout(this.#timer);
    if (Date.now() / 1000 - (this.samples.times.at(-1) ?? 0) > SPREAD) this.samples = new Samples(MOST, SPREAD);  // draw no line across the time in which the page was not open
    this.#poll();
  }

  leave() {
    clearTimeout(this.#timer);
  }

  async #poll() {
    try {
      if (!document.hidden) this.samples.add(Date.now() / 1000, await askText("/metrics"));
      this.trouble.replaceChildren();
      this.grid.hidden = false;
      this.#draw();
    } catch (error) {
      this.trouble.replaceChildren(pageFault(this.app, error, () => this.enter()));
      this.grid.hidden = true;
      if (error.needsKey) return;
    }
    clearTimeout(this.#timer);
    if (this.app.place === "live") this.#timer = setTimeout(() => this.#poll(), EVERY_MS);
  }

  #draw() {
    const chosen = this.models.value, names = this.samples.models;
    this.models.replaceChildren(new Option("All models", ALL), ...names.map(name => new Option(name, name, false, name === chosen)));
    const of = this.models.value === ALL ? {} : {model_name: this.models.value}, {times} = this.samples;
    for (const {chart, series} of this.charts) chart.update(series.map(read => read(this.samples, of)), times, MOST - 1);
  }
}
