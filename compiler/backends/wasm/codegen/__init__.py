"""From LLVM IR to a module of WebAssembly that imports nothing but memory and a stack."""
