"""The loop level describes what a kernel computes and, after scheduling, how the kernel computes it.

A loop nest starts as mathematics:

    for i in n, j in m {
      C[i, j] = max(contract(r in k) A[i, r] by B[r, j], 0.0)
    }

A reduction is an expression, so fusion is substitution: it replaces a load by the right-hand side of the producer. An expression is a
graph: a node with several uses is one value, computed once. The text gives such a value a name (`let t = ... in t * t`) if the value is a
reduction or long; otherwise, the text has the whole value at each use.

Indices are `Dim`s, and loop variables are `DimVar`s; `Let` turns an integer read from memory into a variable. Scheduling rewrites nests
into loops of other kinds, explicit accumulators and intrinsic tiles.
"""
