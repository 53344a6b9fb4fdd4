"""Benchmarks of compiled code, of the compiler and of the quality of quantised weights, without a server."""
