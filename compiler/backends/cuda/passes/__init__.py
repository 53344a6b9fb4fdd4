"""Passes over graphs for NVIDIA GPUs alone."""
