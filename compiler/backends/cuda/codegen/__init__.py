"""Emit scheduled loop nests as LLVM IR for NVIDIA GPUs, and compile the IR to PTX."""
