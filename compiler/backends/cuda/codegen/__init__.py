"""Emit scheduled loop nests as LLVM IR for NVIDIA GPUs, and compile it to PTX."""
