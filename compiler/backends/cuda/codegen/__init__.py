"""Scheduled loop nests as LLVM IR for NVIDIA GPUs, and that as PTX."""
