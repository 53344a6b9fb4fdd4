"""NVIDIA GPUs: their memory, their kernels, and regions that run as one copy and one graph launch.

pycuda owns the device, its context, memory, streams and events; `driver.py` calls the driver for what pycuda lacks. pycuda is imported only
when a program needs GPUs.
"""

ARCHITECTURES = ("nvptx64",)  # architectures as LLVM names them
