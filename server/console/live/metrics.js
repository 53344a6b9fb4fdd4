/* Samples of /metrics over the last minutes: gauges, rates of counters, quantiles of histograms. */

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/* Parse Prometheus text into {name: [{labels, value}]}. */
export function parseExposition(text) {
  const series = {};
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, c) => c === "n" ? "\n" : c)]));
    (series[found[1]] ??= []).push({labels, value: found[3] === "+Inf" ? Infinity : Number(found[3])});
  }
  return series;
}

export class Samples {
  #samples = [];  // {time, series}, oldest first

  constructor(most, spread) {
    this.most = most;  // number of samples to keep
    this.spread = spread;  // samples over which a rate or a quantile is taken
  }

  add(time, text) {
    this.#samples.push({time, series: parseExposition(text)});
    if (this.#samples.length > this.most) this.#samples.shift();
  }

  get times() {
    return this.#samples.map(sample => sample.time);
  }

  get models() {
    return [...new Set((this.#samples.at(-1)?.series["relaxserve:model_state"] ?? []).map(({labels}) => labels.model_name))];
  }

  /* Return the sum of a gauge over the series with these labels for each sample, or null where there is no such series. */
  gauge(name, labels) {
    return this.#samples.map(({series}) => total(series, name, labels));
  }

  mean(name, labels) {
    return this.#samples.map(({series}) => {
      const values = chosen(series, name, labels);
      return values.length ? values.reduce((sum, {value}) => sum + value, 0) / values.length : null;
    });
  }

  /* Return the growth of a counter per second for each sample. A counter that shrank has been reset. */
  rate(name, labels) {
    return this.#samples.map((sample, at) => {
      const before = this.#samples[Math.max(0, at - this.spread)];
      const [now, then] = [total(sample.series, name, labels), total(before.series, name, labels)];
      if (now === null || then === null || sample === before) return null;
      return Math.max(0, now >= then ? now - then : now) / (sample.time - before.time);
    });
  }

  /* Return a quantile of a histogram's latest observations for each sample, interpolated within its bucket, or null where there are none. */
  quantile(name, share, labels) {
    return this.#samples.map((sample, at) => {
      const before = buckets(this.#samples[Math.max(0, at - this.spread)].series, name, labels);
      const now = [...buckets(sample.series, name, labels)].sort(([a], [b]) => a - b).map(([bound, value]) => [bound, value - (before.get(bound) ?? 0)]);
      return quantileOf(now, share);
    });
  }
}

export function quantileOf(cumulative, share) {
  const all = cumulative.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  const rank = share * all;
  let [low, below] = [0, 0];
  for (const [bound, count] of cumulative) {
    if (count >= rank) return bound === Infinity ? low : low + (bound - low) * (count > below ? (rank - below) / (count - below) : 0);
    [low, below] = [bound, count];
  }
  return low;
}

function buckets(series, name, labels) {
  const sums = new Map();
  for (const {labels: {le}, value} of chosen(series, `${name}_bucket`, labels)) {
    const bound = le === "+Inf" ? Infinity : Number(le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return sums;
}

const chosen = (series, name, labels) =>
  (series[name] ?? []).filter(one => Object.entries(labels).every(([label, value]) => one.labels[label] === value));

function total(series, name, labels) {
  const values = chosen(series, name, labels);
  return values.length ? values.reduce((sum, {value}) => sum + value, 0) : null;
}
