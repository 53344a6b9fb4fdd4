"""Writing LLVM IR as text."""
