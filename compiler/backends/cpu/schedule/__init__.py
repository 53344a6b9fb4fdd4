"""How kernels run on the CPU: which loops, threads, vectors and tiles a loop nest gets."""
