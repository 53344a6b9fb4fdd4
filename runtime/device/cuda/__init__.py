"""NVIDIA GPUs: their memory, the kernels that they run, and a step as one copy and one launch of a graph.

pycuda owns the device, its context, memory, streams and events; `driver.py` calls the driver for what pycuda lacks. Nothing here is
imported before a GPU is asked for."""

ARCHITECTURES = ("nvptx64",)  # as LLVM names it
