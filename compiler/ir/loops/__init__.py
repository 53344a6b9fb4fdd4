"""The loop level: what a kernel computes, and, after scheduling, how.

A loop nest starts as mathematics:

    for i in n, j in m {
      C[i, j] = max(contract(r in k) A[i, r] by B[r, j], 0.0)
    }

A reduction is an expression, so fusing is substitution: a producer's right-hand side takes the place of a load. An expression is a graph:
a node that several others refer to is one value, computed once. Text names such values: `let t = exp(A[i, j]) in t * t`.

Indices are `Dim`s, and so are loop variables (`DimVar`); an integer read from memory becomes one through `Let`. Scheduling rewrites nests
into loops of other kinds, explicit accumulators and intrinsic tiles.
"""
