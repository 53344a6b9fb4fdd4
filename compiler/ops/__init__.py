"""Every family of operators. Importing this fills the tables."""

from compiler.ops import (
    attention,
    create,
    dense_attention,
    dynamic,
    elementwise,
    embedding,
    index,
    manipulate,
    matmul,
    normalize,
    quantize,
    ragged,
    random,
    reduce,
)

__all__ = [
    "attention",
    "create",
    "dense_attention",
    "dynamic",
    "elementwise",
    "embedding",
    "index",
    "manipulate",
    "matmul",
    "normalize",
    "quantize",
    "ragged",
    "random",
    "reduce",
]
