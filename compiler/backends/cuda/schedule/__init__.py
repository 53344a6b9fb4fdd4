"""Schedules for GPUs: assign blocks and threads to a loop nest."""
