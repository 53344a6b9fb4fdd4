"""Passes that only the back ends for CPUs and for WebAssembly run."""
