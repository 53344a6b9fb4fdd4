"""The back end for CPUs: x86-64, AArch64 and RISC-V."""
