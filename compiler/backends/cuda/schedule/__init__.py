"""Which block and which thread computes what."""
