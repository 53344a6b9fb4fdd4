"""Keep what benchmarks measured, and write BENCHMARKS.md from it."""
