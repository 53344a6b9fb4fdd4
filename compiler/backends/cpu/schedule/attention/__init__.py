"""Attention on a CPU: one loop over blocks of keys (the walk), which several kinds of instructions (the units) share.

A row is a query head of a token. The walk of a row is its loop over blocks of keys (FlashAttention's online softmax). It computes the
scores of a block, their maximum, exponentials and weighted values while the block is in a cache. If the maximum rises, it rescales the sums
so far. The matrix of scores is never stored.

A sequence is cut at fixed positions into splits, blocks, panels and pages; each unit defines their sizes (`Cut`). Blocks of a split are
added in order, and splits are merged in order. For a row, the order depends only on the position of its token, so a row has the same bits
in any batch, for any chunking of the prompt, with any number of threads. Threads claim items (`Item`), of two kinds:

    token        a token with one or more kv heads, and all its splits. If sequences have several splits, each split of the last tokens of
                 a batch is an item of its own, so that one sequence keeps all threads busy (flash decoding), and a second phase merges the
                 splits. Memory limits the speed, so an item reads the keys of a block and then their values, in whole pages, and
                 prefetches the next pages.
    tile         tokens of one sequence with one kv head (prefill). Their rows fill register tiles, which share the loads of keys and
                 values. Arithmetic limits the speed.

A unit (`Unit`) multiplies with one kind of instructions. Units differ in what they multiply, in the order in which they read a block
(`Order`), in how they prefetch, and in how they keep infinite or NaN values away from rows that do not see them. All units support windows
and chunks (`Seen`), sinks (scores without a value) and splits (`Walk`), and softcaps (bounds of scores). Only some units support latents
(keys whose beginnings are the values), pages of 8 bits, or pages of more bits (`Cache`); `_unit_for` in paged.py chooses a unit that
supports the operands.

In order of reading:

    walk.py              the walk of an item over splits and blocks, and what a unit is
    paged.py             the phases of the kernel, and its items
    operands.py          the operands: tokens, positions and pages, and the keys that rows see
    items.py             the rows of an item
    blocks.py, pages.py  the keys and values of a block, and what is prefetched
    softmax.py           the softmax of rows over the keys so far, and how splits are merged
    floats.py            the unit of vectors of f32, or of pairs of bf16
    integers.py          the unit of exact products of integers, for 8-bit pages
    matrix_rows.py       a matrix unit, for pages of bf16: how it loads and multiplies panels
    matrix.py            the `Unit` of a matrix unit, and how it adds a block to a tile
    ragged.py            attention without the walk, in the texts of an encoder, whose keys are not in pages: each token has a lane
"""
