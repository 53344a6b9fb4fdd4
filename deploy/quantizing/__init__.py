"""Quantise the matrices of a model to a number of bits per weight, once, with as little effect on its predictions as the bits allow.

`quantize.py` runs the steps: measure the inputs of the matrices (deploy/quality/observe.py), quantise (`matrices.py`), measure how much the
predictions change with each kind of matrix (`sensitivity.py`), and choose the width (the number format) of each matrix (`mix.py`).
`kept.py` stores the result in the cache.
"""
