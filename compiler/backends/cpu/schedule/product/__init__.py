"""Products of matrices on a CPU: tiles of rows times panels of columns, summed in one of six ways.

A product is a nest whose value contains sums over k of rows times columns: one sum (a linear layer), or several over the same rows (gate
and up). A product may also have an epilogue, and may decode its columns (compiler/idioms/product.py). Threads claim panels of columns with
blocks of rows, and compute the rows of a block in tiles. Accumulators stay in registers for the whole of k, except that they are in memory
if a matrix unit computes k in parts. In each way, the products of a row are added in the same order in every tile, so a row has the same
bits in every batch.

In order of reading:

    ways.py          choose how a product is summed:
    floats.py        columns of any kind, decoded to f32, multiplied and added in vectors
    pairs.py         panels of bf16 pairs: instructions multiply pairs of neighbours along k
    scaled.py        weights with scales, such as 8-bit floats: each group is summed as bf16 pairs, and groups are added in order
    groups.py        integers: each group is summed exactly in i32, and groups are added in order in f32
    streams.py       integers as in groups.py, where the weights of a matrix and their scales are in several streams
    widened.py       4-bit weights on a matrix unit, which multiplies parts of panels that are widened to 8 bits; a single row on vectors
    panels.py        the loops over the result: what threads claim, and the tiles of a claim
    choices.py       if rows choose among several matrices: blocks of rows with the same choice
    tile_origin.py   a tile: where its rows and columns are in the nest, and how its results are stored
    blocks.py        the loops of a matrix unit over parts of k
"""
