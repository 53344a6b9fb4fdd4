"""The interpreter: a plain NumPy implementation of both levels, which defines the meaning of programs."""
