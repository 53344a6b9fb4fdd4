"""Decode audio files of clients, in a separate process, to 16,000 samples a second of one channel, as models hear them."""
