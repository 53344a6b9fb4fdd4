"""Products of matrices on a CPU: panels of columns times tiles of rows, summed in the best of four ways.

A product is a nest whose value contains sums over k of rows times columns: one sum (linear, matmul), or several over the same rows (gate
and up), with any epilogue, and with any decoding of the columns (idioms/product.py). Threads claim panels of columns and blocks of rows,
and process the rows of a block in tiles. Accumulators stay in registers for all of k, or wait in memory while a matrix unit processes k in
parts. Each way adds the products of a row in a fixed order, whatever tile the row is in, so a row has the same bits in every batch.

In order of reading:

    ways.py          choose the way a product is summed:
    floats.py        any columns: decoded to f32, then multiplied and added in vectors
    pairs.py         bf16 elements in panels of pairs: an instruction of the machine adds two products at a time
    groups.py        integers: instructions sum a group exactly in i32; groups are added in order in f32
    widened.py       weights of 4 bits for a matrix unit: a part of a panel is widened to 8 bits once, for all rows of a block
    panels.py        the walk over the result: what threads claim, and the tiles of a claim
    choices.py       blocks of rows that choose one of several matrices, if a product has several
    tile_origin.py   a tile: its rows and columns in the nest, and how its results are stored
    blocks.py        the walk of a matrix unit through k
"""
