"""Quantise the matrices of a model to a number of bits per weight, once, with as little effect on its predictions as the bits allow.

`quantize.py` runs the steps: observe what the matrices read (deploy/quality/observe.py), quantise (`matrices.py`), measure how much each
kind of matrix matters (`sensitivity.py`), and choose the width of each (`mix.py`). `kept.py` stores the result in the cache.
"""
