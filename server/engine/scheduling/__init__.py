"""Scheduling: which tokens run in the next step, in which order API keys take turns, and which pages of the cache sequences get."""
