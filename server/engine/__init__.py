"""The engine of a worker: admit, schedule, run, sample, publish."""
