"""The benchmarks of `relaxserve bench`, and the modules that the benchmarks share."""
