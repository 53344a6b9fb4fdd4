"""Turn flat programs into C libraries: straight-line calls of the kernels and a few functions around them, in one archive."""
