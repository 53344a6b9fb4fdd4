"""Assemble and ship relaxserve: command line, settings, worker processes, model loading, benchmarks."""
