"""Attention on a CPU: FlashAttention's online softmax, in blocks of keys.

A row is a query head of a token. A walk is a row's loop over blocks of keys. It computes the scores of a block, their maximum,
exponentials and weighted values while the block is in the first-level cache. If the maximum rises, it rescales the sums so far.
The matrix of scores is never stored.

Paged attention cuts a sequence at fixed positions into blocks of BLOCK keys, and into splits of SPLIT blocks; both are larger for 8-bit
pages (integer.py) and on matrix units (matrix.py). It adds blocks of a split in order, and merges splits in order. The order depends only
on the token's own position, so a row has the same bits in any batch, for any chunking of the prompt, with any number of threads. Two kinds
of work items share one kernel:

    decoding     an item is a token with all its splits. If there are few tokens, each split is an item of its own, so that one sequence
                 keeps all threads busy (flash decoding), and a second phase merges the splits. Memory bandwidth is the limit, so an
                 item reads the keys of several blocks and then their values, in whole pages, and prefetches the next page.
    prefill      an item is a tile of tokens of one sequence, which share keys and values: their rows fill register tiles. Arithmetic
                 is the limit.

In order of reading:

    paged.py             the phases of the kernel and their work items
    operands.py          the operands and parameters, and where blocks, splits and tiles of tokens begin
    rows.py              the softmax state of rows, and the page that they read
    partial_softmax.py   the sums of a split, and how splits are merged
    vector_walk.py       the walks of a token and of a tile over the blocks of a split,
    vector.py            and how they compute a block: scores, softmax, values
    vector_products.py   the products that both compute, of f32 or of pairs of bf16
    turned.py            the values, if pages have only keys
    integer_walk.py      the same walks over 8-bit pages,
    integer.py           and how they compute a block with products of integers
    matrix_walk.py       the same walks on a matrix unit,
    matrix.py            and how they compute a block
    ragged.py            texts of an encoder: each token has a lane, because every token attends to its whole text
"""
