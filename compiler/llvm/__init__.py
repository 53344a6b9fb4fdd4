"""Write LLVM IR as text."""
