"""The back end for WebAssembly: the schedules and the LLVM IR of the CPU back end, compiled and linked to one module."""
