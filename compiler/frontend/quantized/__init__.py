"""Checkpoints whose weights are quantised already: how each method stores a matrix, and which values it stands for."""
