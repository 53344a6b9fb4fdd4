"""The benchmarks behind `relaxserve bench`, and what they share."""
