"""Measure what rounding costs: how far the predictions of a form of a model are from those of its exact weights, on a built-in text. Also
measure how fast the form is for one client."""
