"""What back ends share on the way from scalar expressions to LLVM IR, and from that to machine code."""
