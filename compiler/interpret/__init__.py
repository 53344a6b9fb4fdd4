"""What programs mean: a plain interpreter of both levels, in NumPy."""
