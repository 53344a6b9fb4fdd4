"""Compile LLVM IR to a WebAssembly module that imports only a memory and, if its code uses the stack, a stack pointer."""
