"""Benchmarks of whole servers and workers under clients."""
