/* Keep samples of the metrics, and compute from them gauges, rates of counters, and quantiles of histograms. */

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

/* Return the samples of an answer of /admin/history, whole. */
export function samplesOf({series: names, samples}) {
  const now = new Map();
  return samples.map(({time, values}) => {
    for (const [at, value] of Object.entries(values)) {
      if (value === null) now.delete(at);
      else now.set(at, value);
    }
    const series = {};
    for (const [at, value] of now) (series[names[at].name] ??= []).push({labels: names[at].labels, value});
    return {time, series};
  });
}

export class Samples {
  #samples = [];  // {time, series, known}, oldest first; `known` has the figures that were computed for a sample

  /* `keptS`: seconds to keep. `fineS`: seconds for which every sample is kept; older ones are at least `spreadS` apart.
     `spreadS`: seconds over which a rate or a quantile is taken. */
  constructor({keptS, fineS, spreadS}) {
    Object.assign(this, {keptS, fineS, spreadS});
  }

  add(time, series) {
    this.#samples.push({time, series, known: new Map()});
    let last = -Infinity;
    this.#samples = this.#samples.filter(sample => {
      const isKept = time - sample.time <= this.keptS && (time - sample.time <= this.fineS || sample.time - last >= 0.9 * this.spreadS);
      if (isKept) last = sample.time;
      return isKept;
    });
  }

  /* Put those of `samples` that are older than all present ones before them. Their times are by the server's clock, and `now` by the page's: if
     the server's is ahead, move them back, so that the last one is of now. */
  adopt(samples, now) {
    const first = this.#samples[0]?.time ?? Infinity, ahead = Math.max(0, (samples.at(-1)?.time ?? 0) - now);
    const moved = samples.map(sample => ({...sample, time: sample.time - ahead, known: new Map()}));
    this.#samples = [...moved.filter(sample => sample.time < first), ...this.#samples];
  }

  get times() {
    return this.#samples.map(sample => sample.time);
  }

  get models() {
    return [...new Set((this.#samples.at(-1)?.series["relaxserve:model_state"] ?? []).map(({labels}) => labels.model_name))];
  }

  /* For each sample, return the sum of a gauge over the series with these labels, or null where there is no such series. */
  gauge(name, labels) {
    return this.#each("gauge", name, labels, ({series}) => total(series, name, labels));
  }

  /* For each sample, return the mean of a gauge over the series with these labels, or null where there is no such series. */
  mean(name, labels) {
    return this.#each("mean", name, labels, ({series}) => {
      const values = chosen(series, name, labels);
      return values.length ? values.reduce((sum, {value}) => sum + value, 0) / values.length : null;
    });
  }

  /* For each sample, return by how much a counter grows per second, or null where there is no such series or no earlier sample. A counter that
     shrank has been reset. */
  rate(name, labels) {
    return this.#each("rate", name, labels, (sample, before) => {
      const [now, then] = [total(sample.series, name, labels), total(before.series, name, labels)];
      if (now === null || then === null || sample === before) return null;
      return Math.max(0, now >= then ? now - then : now) / (sample.time - before.time);
    });
  }

  /* For each sample, return a quantile of a histogram's latest observations, interpolated within its bucket, or null where there are none. */
  quantile(name, share, labels) {
    return this.#each(`quantile ${share}`, name, labels, (sample, before) => {
      const then = buckets(before.series, name, labels);
      const now = [...buckets(sample.series, name, labels)].sort(([a], [b]) => a - b).map(([bound, value]) => [bound, value - (then.get(bound) ?? 0)]);
      return quantileOf(now, share);
    });
  }

  /* Return a figure of each sample and the sample `spreadS` before it. It is computed once for each sample. */
  #each(kind, name, labels, compute) {
    const key = JSON.stringify([kind, name, labels]);
    let from = 0;
    return this.#samples.map((sample, at) => {
      while (from + 1 < at && sample.time - this.#samples[from + 1].time >= 0.9 * this.spreadS) from += 1;
      if (!sample.known.has(key)) sample.known.set(key, compute(sample, this.#samples[Math.min(from, at)]));
      return sample.known.get(key);
    });
  }
}

/* Return the quantile of a histogram whose buckets are [upper bound, cumulative count], sorted by bound; null if it is empty. In the last bucket,
   which has no bound, return the bound of the one before. */
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
