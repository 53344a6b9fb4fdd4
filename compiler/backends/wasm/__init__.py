"""The back end for WebAssembly: it compiles the CPU back end's schedules and LLVM IR, and links them to one module."""
