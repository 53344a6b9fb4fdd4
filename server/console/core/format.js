/* Format numbers for people. */

export function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= size) return `${(count / size).toLocaleString("en", {maximumFractionDigits: count < 10 * size ? 1 : 0})} ${unit}`;
  }
  return `${count} B`;
}

export function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toLocaleString("en", {maximumFractionDigits: value < 0.01 ? 1 : 0})} ms`;
  return `${value.toLocaleString("en", {maximumFractionDigits: value < 10 ? 1 : 0})} s`;
}

export const count = value => value.toLocaleString("en", {maximumFractionDigits: value < 10 && value % 1 ? 1 : 0});

export const percent = share => `${(100 * share).toLocaleString("en", {maximumFractionDigits: share < 0.1 ? 1 : 0})} %`;
