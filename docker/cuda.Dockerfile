# Adds pycuda to the image of docker/cpu.Dockerfile. Only the build stage has a compiler and CUDA's headers. The host needs NVIDIA's driver
# 550 or newer and its container toolkit, which puts the driver's library into containers.
#
#     docker build -f docker/cpu.Dockerfile -t relaxserve .
#     docker build -f docker/cuda.Dockerfile -t relaxserve:cuda .
#     docker run --gpus all --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 -v relaxserve-cache:/cache \
#         -e RELAXSERVE_API_KEYS=a-long-key relaxserve:cuda serve org/model --device cuda

ARG BASE=python:3.12-slim-bookworm
ARG IMAGE=relaxserve

FROM ${BASE} AS build
WORKDIR /src
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY constraints.txt ./
# pip checks the hash of each file that it installs. pycuda is the only source: it is built with numpy and setuptools of checked hashes.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 CHECK="--require-hashes --only-binary :all: -c constraints.txt"
RUN sed -n '/^pip==/,/[^\\]$/p' constraints.txt > pip.txt \
 && python3 -m pip install --require-hashes -r pip.txt \
 && python3 -m pip install $CHECK setuptools numpy
# The driver's library is on the host, so pycuda is linked with an empty library of its name, which the linker would otherwise leave out.
RUN python3 -m pip install $CHECK --no-deps --target headers nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-profiler-api \
 && root=$(dirname "$(dirname "$(find /src/headers -name cuda.h)")") \
 && gcc -shared -Wl,-soname,libcuda.so.1 -o libcuda.so -x c /dev/null \
 && printf '%s\n' "CUDA_ROOT = '$root'" "CUDA_INC_DIR = ['$root/include']" "CUDADRV_LIB_DIR = ['/src']" "CUDADRV_LIBNAME = ['cuda']" \
        "CUDA_ENABLE_CURAND = False" "USE_SHIPPED_BOOST = True" > ~/.aksetup-defaults.py
# numpy and typing_extensions are in the other image.
RUN LDFLAGS=-Wl,--no-as-needed python3 -m pip install $CHECK --no-binary pycuda --no-build-isolation --no-deps --target /packages \
        pycuda pytools siphash24 Mako MarkupSafe platformdirs

FROM ${IMAGE}
COPY --from=build /packages /opt/relaxserve/lib/python3.12/site-packages
