"""Code generation that back ends share: statements and expressions to LLVM IR, and LLVM IR to machine code."""
