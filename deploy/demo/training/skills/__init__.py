"""The skills of the demo model, one per file. Each file has functions that make a `Turn` with a random number generator."""
