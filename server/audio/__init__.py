"""Decode audio from outside, in a process of its own, to what models hear: 16,000 samples a second of one channel."""
