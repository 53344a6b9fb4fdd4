"""The CPU as a device: its cores as a team of threads, its memory, and the machine code that they run."""

ARCHITECTURES = ("x86_64", "aarch64")  # architectures as LLVM names them
