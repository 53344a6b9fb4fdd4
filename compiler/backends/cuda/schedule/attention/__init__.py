"""Attention on a GPU: one walk over splits of keys, with two units that compute a split.

A row is a token with one query head; all heads of a block share a kv head. A run is one token, or several adjacent tokens of one sequence.
A block computes the rows of a run:

    for block b {
      shared queries, joined, found
      for each split of the keys that a row sees {
        found <- the softmax of each row over the split        (a unit)
        joined <- join(joined, found)
      }
      joined -> out, or, if splits run in parallel, memory from which the last block of the token joins all splits
    }

A split is SPLIT keys, beginning at a multiple of SPLIT in their sequence. Splits are joined in order. For up to FEW tokens, each split has
a block of its own, and the block that finishes last joins all splits of its token. For more tokens, one block computes all splits of a run.
Both ways do the same computations, and each row has its own scores, weights and sums, so a token has the same bits in every batch.

In order of reading:

    walk.py       the walk: what blocks compute, and how splits are joined
    floats.py     a unit for keys and values of any type, in pages or in concatenated texts: a run is one token, and products are in f32
    tensors.py    a unit for pages of bf16, on tensor cores: a run is as many adjacent tokens of one sequence as fit
    warpgroups.py on GPUs with `wgmma`, a launch that computes long runs before the launch of tensors.py
"""
