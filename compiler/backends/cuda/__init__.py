"""The CUDA back end: loop nests become blocks and threads, and LLVM compiles them to PTX."""
