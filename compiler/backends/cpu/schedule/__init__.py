"""Schedules for the CPU: assign loops, threads, vectors and tiles to a loop nest."""
