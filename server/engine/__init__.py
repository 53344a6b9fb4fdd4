"""The engine of a worker: admit, schedule, encode, run, sample, publish."""
