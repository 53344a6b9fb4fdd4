"""Every family of operators. Importing this fills the tables."""

from compiler.ops import create, dynamic, elementwise, embedding, index, manipulate, normalize, random, reduce
from compiler.ops.attention import dense, kv_cache, paged, ragged
from compiler.ops.products import integer, integer_rows, matmul, quantize, widened
from compiler.ops.sampling import operators

__all__ = [
    "create",
    "dense",
    "dynamic",
    "elementwise",
    "embedding",
    "index",
    "integer",
    "integer_rows",
    "kv_cache",
    "manipulate",
    "matmul",
    "normalize",
    "operators",
    "paged",
    "quantize",
    "ragged",
    "random",
    "reduce",
    "widened",
]
