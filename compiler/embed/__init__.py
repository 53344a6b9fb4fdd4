"""Flat programs as libraries for C: straight-line calls of the kernels, and a few functions around them, in one archive."""
