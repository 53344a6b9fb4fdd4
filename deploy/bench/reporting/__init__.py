"""Store the results of benchmarks, and write BENCHMARKS.md from them."""
