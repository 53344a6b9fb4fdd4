"""The CUDA back end: loop nests become blocks and threads, and LLVM makes PTX of them."""
