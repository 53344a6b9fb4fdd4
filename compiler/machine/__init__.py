"""Machines as data: targets, formats of packed weights, and the tiles that multiply on each target."""
