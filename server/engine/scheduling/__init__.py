"""Which tokens run in the next step, in whose turn, on which pages of the cache."""
