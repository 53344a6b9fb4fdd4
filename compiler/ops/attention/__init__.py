"""The operators of attention, and of the caches that it reads."""
