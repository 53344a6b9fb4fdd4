"""Compare kernels that read and write 256 MB with copies of the same number of bytes.

There are two copies. The system's memcpy, on the same number of cores, does not depend on our compiler. Our own copy is compiled as the
kernels are, so it also writes large results without filling the caches. It is the faster copy, and a kernel's time beyond it is the cost of
the kernel. All threads are pinned, because two threads on one core halve the measured speed, and unpinned sessions were seen to run at half
speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.driver import compile_module
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.types import tensor
from compiler.ops.elementwise import ADD, MULTIPLY, RELU
from compiler.ops.normalize import LAYER_NORM, LOG_SOFTMAX, RMS_NORM, SOFTMAX
from deploy.bench.measure import Figure
from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.memory import host_buffer
from runtime.session import Session
from tests.lab.timing import by_turns

LENGTH = 4096
ROWS = (256 << 20) // 4 // LENGTH
ROUNDS = 15

KERNELS: dict[str, Callable[[Builder, Var, Var], Var]] = {
    "elementwise chain": lambda b, x, w: b.call(RELU, b.call(ADD, b.call(MULTIPLY, b.call(ADD, x, w), w), w)),
    "softmax": lambda b, x, _: b.call(SOFTMAX, x),
    "log-softmax": lambda b, x, _: b.call(LOG_SOFTMAX, x),
    "rms norm": lambda b, x, w: b.call(RMS_NORM, x, w, eps=1e-5),
    "layer norm": lambda b, x, w: b.call(LAYER_NORM, x, w, w, eps=1e-5),
}


def bandwidth() -> list[Figure]:
    with ThreadPoolExecutor(1) as thread:  # pin this additional thread, so that the calling thread stays unpinned
        return thread.submit(_beside_copies).result()


def _beside_copies() -> list[Figure]:
    x, w = _aligned(ROWS, LENGTH), _aligned(LENGTH)
    x[:] = np.random.default_rng(0).standard_normal(x.shape, np.float32)
    w[:] = 1
    builder = Builder()
    for name, emit in {"copy": lambda b, x, _: b.call(MULTIPLY, x, ScalarValue(1.0, "f32")), **KERNELS}.items():
        params = Var("a", tensor((DimVar("n", 0, ROWS), LENGTH), DType.F32)), Var("b", tensor((LENGTH,), DType.F32))
        with builder.function(name, params):
            with builder.dataflow():
                y = emit(builder, *params)
            builder.returns(y)
    cores = available_cores()
    free = iter(cores)
    figures: list[Figure] = []
    with (
        closing(Session(compile_module(builder.finish()), device_threads=len(cores), pinned=True)) as session,
        ThreadPoolExecutor(len(cores), initializer=lambda: os.sched_setaffinity(0, {next(free)})) as pool,
    ):
        calls = {name: partial(session.call, name, x, w, views=True) for name in ("copy", *KERNELS)}
        # all results are in the same arena, so all calls write to the same memory
        system = partial(memcpy, pool, session.download(calls["copy"]()), x, len(cores))
        for name in KERNELS:
            times = by_turns({"memcpy": system, "copy": calls["copy"], name: calls[name]}, rounds=ROUNDS)
            figures += [_share(name, times, "memcpy", 2 * x.nbytes), _share(name, times, "copy", 2 * x.nbytes)]
    return sorted(figures, key=lambda f: "memcpy" not in f.name)


def _aligned(*shape: int) -> NDArray[np.float32]:
    """Return an array with the alignment of a model's values."""
    return host_buffer(4 * int(np.prod(shape))).view(np.float32).reshape(shape)


def memcpy(pool: ThreadPoolExecutor, to: NDArray[Any], of: NDArray[Any], parts: int) -> None:
    """Copy in equal parts, one per thread. NumPy copies contiguous bytes with the C library's memcpy."""
    list(pool.map(np.copyto, *(np.array_split(array.reshape(-1).view(np.uint8), parts) for array in (to, of))))


def _share(name: str, times: dict[str, list[float]], copy: str, num_bytes: int) -> Figure:
    shares = sorted(limit / own for limit, own in zip(times[copy], times[name], strict=True))
    quarter = len(shares) // 4
    rates = [num_bytes / median(times[which]) / 1e9 for which in (name, copy)]
    note = (
        f"middle half of {len(shares)} rounds: {shares[quarter]:.2f} to {shares[-1 - quarter]:.2f}; {rates[0]:.1f} and {rates[1]:.1f} GB/s"
    )
    return Figure(f"{name}, 256 MB, over {'memcpy' if copy == 'memcpy' else 'our own copy'}", median(shares), "x", 0.85, True, note)
