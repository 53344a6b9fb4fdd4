"""The back end for WebAssembly: it shares schedules and LLVM IR with the CPU back end, and links all kernels into one module."""
