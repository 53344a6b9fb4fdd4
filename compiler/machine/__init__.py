"""Facts about machines: targets, formats of packed weights, and the tiles that each target has."""
