"""Every family of operators. Importing this fills the tables."""

from compiler.ops import attention, elementwise, embedding, manipulate, matmul, normalize, reduce

__all__ = ["attention", "elementwise", "embedding", "manipulate", "matmul", "normalize", "reduce"]
