"""Kernel fusion: which kernels can be joined, and how two loop nests become one."""
