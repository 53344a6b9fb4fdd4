"""The back end for WebAssembly: schedules and LLVM IR of the CPU back end, one module of what LLVM makes of them."""
