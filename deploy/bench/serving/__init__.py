"""Benchmarks of complete servers and workers under the load of clients."""
