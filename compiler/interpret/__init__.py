"""The meaning of programs: a plain interpreter of both levels, in NumPy."""
