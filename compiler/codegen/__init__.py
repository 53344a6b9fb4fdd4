"""The code generation that back ends share: from statements and expressions to LLVM IR, and from LLVM IR to machine code."""
