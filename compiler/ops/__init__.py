"""Every family of operators. Importing this fills the tables."""

from compiler.ops import (
    attention,
    create,
    dense_attention,
    dynamic,
    elementwise,
    embedding,
    index,
    integer,
    manipulate,
    matmul,
    normalize,
    quantize,
    ragged,
    random,
    reduce,
    sampling,
)

__all__ = [
    "attention",
    "create",
    "dense_attention",
    "dynamic",
    "elementwise",
    "embedding",
    "index",
    "integer",
    "manipulate",
    "matmul",
    "normalize",
    "quantize",
    "ragged",
    "random",
    "reduce",
    "sampling",
]
