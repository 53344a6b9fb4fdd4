"""Benchmarks without a server: compiled code, the compiler, and the quality of quantised weights."""
