"""The back end of x86-64 and AArch64."""
