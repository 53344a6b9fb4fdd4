"""Schedules for CPUs: they turn the loops of a nest into threads, vectors and tiles."""
