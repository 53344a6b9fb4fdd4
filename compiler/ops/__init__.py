"""Every family of operators. Importing this fills the tables."""

from compiler.ops import (
    attention,
    create,
    dynamic,
    elementwise,
    embedding,
    index,
    manipulate,
    matmul,
    normalize,
    quantize,
    random,
    reduce,
)

__all__ = [
    "attention",
    "create",
    "dynamic",
    "elementwise",
    "embedding",
    "index",
    "manipulate",
    "matmul",
    "normalize",
    "quantize",
    "random",
    "reduce",
]
