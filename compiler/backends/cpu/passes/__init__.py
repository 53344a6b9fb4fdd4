"""Passes that only the CPU back end runs."""
