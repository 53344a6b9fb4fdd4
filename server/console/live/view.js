/* The live page: the server's activity now and in the last hour, which the server remembers. */

import {ask, askText} from "../core/api.js";
import {find, h} from "../core/dom.js";
import {bytes, count, percent, seconds} from "../core/format.js";
import {keep, load} from "../core/settings.js";
import {pageFault, pageHead} from "../core/page.js";
import {Chart} from "./chart.js";
import {parseExposition, Samples, samplesOf} from "./metrics.js";

const EVERY_MS = 1000;
const SPREAD_S = 5;  // seconds over which rates are taken
const SPANS = [["3 minutes", 180], ["15 minutes", 900], ["1 hour", 3600]];
const KEPT = {keptS: 3600, fineS: 180, spreadS: SPREAD_S};
const ALL = "";

/* For each chart: its title, the format of its values, and the series with a function that reads each from the samples. */
const CHARTS = [
  ["Tokens per second", {format: count, top: 10}, {
    generated: (samples, of) => samples.rate("vllm:generation_tokens_total", of),
    "prompt, computed": (samples, of) => samples.rate("relaxserve:prefill_tokens_total", of),
  }],
  ["Prompt tokens to compute", {format: count, top: 100}, {left: (samples, of) => samples.gauge("relaxserve:prompt_tokens_left", of)}],
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

const WATCHED = ["vllm:generation_tokens_total", "relaxserve:prefill_tokens_total", "relaxserve:prompt_tokens_left", "vllm:num_requests_running",
  "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
  "relaxserve:worker_resident_bytes", "relaxserve:model_state"];

function quantiles(name) {
  return {median: (samples, of) => samples.quantile(name, 0.5, of), "95th": (samples, of) => samples.quantile(name, 0.95, of)};
}

/* Return only the series that the charts read: a page that is open for long keeps many samples. */
const watched = series => Object.fromEntries(WATCHED.filter(name => name in series).map(name => [name, series[name]]));

export class LiveView {
  #timer = null;
  #names = [];  // models in the list

  constructor(app) {
    this.app = app;
    this.root = find("#live");
    this.samples = new Samples(KEPT);
    this.charts = CHARTS.map(([title, looks, series]) => ({chart: new Chart(title, Object.keys(series), looks), series: Object.values(series)}));
    this.models = h("select", {class: "quiet", "aria-label": "Model", onchange: () => this.#draw()}, new Option("All models", ALL));
    this.span = h("select", {class: "quiet", "aria-label": "Time", onchange: () => { keep("span", this.span.value); this.#draw(); }},
      SPANS.map(([label, seconds]) => new Option(label, seconds, false, seconds === Number(load("span", SPANS[0][1])))));
    this.trouble = h("div");
    this.grid = h("div", {class: "charts"}, this.charts.map(({chart}) => chart.element));
    this.root.append(pageHead("Live", this.span, this.models), h("div", {class: "body"}, this.trouble, this.grid,
      h("p", {class: "faint small"}, "Rates and quantiles are of five seconds. The server remembers an hour for administrators. The figures come from ", h("code", {}, "/metrics"), ", which Prometheus reads, too.")));
  }

  enter() {
    clearTimeout(this.#timer);
    const isStale = Date.now() / 1000 - (this.samples.times.at(-1) ?? 0) > SPREAD_S;
    if (isStale) this.samples = new Samples(KEPT);  // draw no line across the time in which the page was not open
    this.#poll(isStale);
  }

  leave() {
    clearTimeout(this.#timer);
  }

  async #poll(isFirst = false) {
    try {
      if (isFirst) await this.#remember();
      if (!document.hidden) this.samples.add(Date.now() / 1000, watched(parseExposition(await askText("/metrics"))));
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

  /* Begin with the server's history. Without a key for the administration, the page begins empty. */
  async #remember() {
    try {
      this.samples.adopt(samplesOf(await ask("/admin/history")), Date.now() / 1000);
    } catch (error) {
      if (!error.needsKey) throw error;
    }
  }

  /* List the models. A list that is open, or read out, would be lost with its entries, so they stay while the models are the same. */
  #listModels() {
    const chosen = this.models.value, names = this.samples.models;
    if (names.length === this.#names.length && names.every((name, at) => name === this.#names[at])) return;
    this.#names = names;
    this.models.replaceChildren(new Option("All models", ALL), ...names.map(name => new Option(name, name, false, name === chosen)));
  }

  #draw() {
    this.#listModels();
    const of = this.models.value === ALL ? {} : {model_name: this.models.value}, {times} = this.samples;
    for (const {chart, series} of this.charts) chart.update(series.map(read => read(this.samples, of)), times, Number(this.span.value));
  }
}
