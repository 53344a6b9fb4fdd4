"""The CUDA back end: schedules put loop nests into blocks and threads, and LLVM compiles them to PTX."""
