"""Attention on a CPU: FlashAttention's online softmax, in blocks of keys.

A row is a query head of a token. Each row walks the keys once, a block at a time: the scores of a block, their maximum, the exponentials,
and the weighted values are computed while the block is in the first-level cache. If the maximum rises, the sums so far are rescaled. The
matrix of scores is never stored.

Paged attention cuts positions into blocks of BLOCK keys and into splits of SPLIT blocks, at fixed positions. Blocks of a split are added in
order, and splits are merged in order. The order depends only on the token's own position, so a row has the same bits in any batch, for any
chunking of the prompt, with any number of threads. Two kinds of work items share one kernel:

    decoding     a token walks its splits alone. If there are few tokens, each split is an item of its own, so that one long sequence
                 keeps all threads busy (flash decoding), and a second phase merges the splits. Memory bandwidth is the limit: the keys of
                 several blocks are read and then their values, in whole pages, each of which prefetches the next.
    prefill      the tokens of a tile belong to one sequence and share keys and values: the rows of the tile fill register tiles. Arithmetic
                 is the limit.

In order of reading:

    paged.py             the phases of the kernel and their work items
    operands.py          the operands and parameters, and where blocks, splits and tiles of tokens begin
    rows.py              the state of some rows, and the page that they read
    partial_softmax.py   the sums of a split, and how splits are merged
    vector_walk.py       the walks of a token and of a tile over the blocks of a split, and
    vector.py            how they compute a block: scores, softmax, values
    vector_products.py   products of f32 or of pairs of bf16
    matrix_walk.py       the same walks on a matrix unit, and
    matrix.py            how they compute a block
    ragged.py            texts of an encoder: a lane per token, as every token attends to its whole text
"""
