"""Scheduling: which tokens run in the next step, in which order of turns, on which pages of the cache."""
