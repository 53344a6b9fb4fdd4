"""Operators that multiply matrices of floats or integers, and operators that quantise and pack the factors."""
