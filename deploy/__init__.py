"""The parts put together and shipped: command line, settings, workers, loading, benchmarks."""
