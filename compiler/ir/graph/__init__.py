"""The graph level: functions in A-normal form.

    Function   params -> Body
    Body       blocks, then a result
    Block      bindings, in order; a *dataflow* block is pure and straight-line, a *captured* one is replayed by one native call
    Binding    var = value        (the operands of a value are atoms, not values; only an If contains bodies)

Nodes are immutable and compare by identity; `equal.structural_equal` compares structure. Lowering changes the kinds of values: a program
starts with operator calls, `legalize` turns most of them into `CallTir` (sorting and data-dependent shapes into `CallLibrary`), and
`explicit_memory` turns both kinds of calls into `Alloc` and `Launch`. A library routine whose result has an unknown shape stays a
`CallLibrary`, because it allocates its own results.
"""
