"""The graph level: functions in A-normal form.

    Function   params -> Body
    Body       blocks, then a result
    Block      bindings, in order; a *dataflow* block is pure and straight-line, a *captured* one is replayed as a unit
    Binding    var = value        (a value is never nested: its operands are atoms)

Nodes are immutable and compare by identity; `equal.structural_equal` compares structure. Lowering changes the kinds of values: a program
starts with operator calls, `legalize` turns them into `CallTir`, and `explicit_memory` turns those into `Alloc` and `Launch`.
"""
