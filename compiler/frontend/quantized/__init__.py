"""Quantised checkpoints: how each quantisation method stores a matrix, and how the matrix is computed from what is stored."""
