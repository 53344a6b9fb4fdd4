"""The back end for x86-64 and AArch64."""
