"""Compile LLVM IR to a WebAssembly module that imports only a memory and a stack pointer."""
