"""Load the stages of a model: divide its layers, start or reach the processes, and agree on pages."""
