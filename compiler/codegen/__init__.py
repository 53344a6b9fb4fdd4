"""Code generation that all back ends share: statements and expressions to LLVM IR, and LLVM IR to machine code."""
