"""Operators that multiply matrices of floats or integers, and operators that quantise, pack, unpack and look up the factors."""
