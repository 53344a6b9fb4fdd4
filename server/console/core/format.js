/* Format numbers for people. */

const UNITS = [["TiB", 2 ** 40, 2], ["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]];
const LEAST = 0.99995;  // share of a unit from which on a number is shown in it, because it would be rounded to a whole one

/* Format a number of bytes as the log and the commands do (runtime/units.py). */
export function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  for (const [unit, size, digits] of UNITS) {
    if (count >= LEAST * size) return `${(count / size).toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits})} ${unit}`;
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
