"""Turn scheduled loop nests into LLVM IR."""
