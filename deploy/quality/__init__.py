"""Measure how far the predictions of a form of a model are from those of its exact weights, on a built-in text, and how fast it is."""
