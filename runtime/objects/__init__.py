"""Linking of object files: read the ELF objects that LLVM writes, join them, apply their relocations."""
