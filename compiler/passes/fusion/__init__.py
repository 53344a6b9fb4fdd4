"""Fusing kernels: which ones fit together, and how two loop nests become one."""
