"""Schedules for GPUs: they turn the loops of a nest into blocks and threads."""
