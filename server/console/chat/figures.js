/* The figures below an answer: its length, its speed, and why it ended. */

const REASONS = {length: "cut off at the longest answer", stopped: "stopped", interrupted: "interrupted when its page was closed", content_filter: "withheld"};

export function figuresOf({usage, figures, finish}) {
  const parts = [], tokens = usage?.completion;
  if (tokens) parts.push(tokens === 1 ? "1 token" : `${tokens.toLocaleString("en")} tokens`);
  if (tokens && figures?.wrote > 250) parts.push(`${Math.round((tokens - 1) / figures.wrote * 1000)} tokens/s`);  // a shorter time gives no reliable speed
  if (figures) parts.push(`first after ${(figures.waited / 1000).toFixed(2)} s`);
  if (REASONS[finish]) parts.push(REASONS[finish]);
  return parts.join(" · ");
}
