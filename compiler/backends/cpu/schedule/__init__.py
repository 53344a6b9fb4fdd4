"""Schedules for CPUs and WebAssembly: they turn the loops of a nest into threads, vectors and tiles."""
