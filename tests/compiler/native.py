"""Runs one compiled loop nest in one thread, without the runtime."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.bytecode.kernel import KernelCode
from compiler.codegen.link import LinkedCode, link
from compiler.ir.dims import DimVar
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.machine.target import Target, host
from runtime.device.cpu.code import ObjectCode

Array = NDArray[Any]


class Native:
    """A loop nest as machine code, loaded into this process."""

    def __init__(self, prim: PrimFunc, target: Target) -> None:
        self.prim = prim
        self.kernel: KernelCode = emit_kernel("kernel", prim, target)
        self.code: LinkedCode = link([self.kernel], target)
        self._loaded = ObjectCode(self.code.object)

    def __call__(
        self, arrays: Sequence[Array], dims: Mapping[DimVar, int] | None = None, scalars: Mapping[ScalarParam, float] | None = None
    ) -> None:
        known = dict(dims or {})
        for buffer, array in zip(self.prim.buffers, arrays, strict=True):
            for dim, extent in zip(buffer.shape, array.shape, strict=True):
                if dim.var is not None:
                    known.setdefault(dim.var, extent)
        words = [known[v] for v in self.prim.dim_vars]
        for param in self.prim.params:
            if isinstance(param, ScalarParam):
                value = (scalars or {})[param]
                words.append(struct.unpack("<q", struct.pack("<d", value))[0] if param.dtype.is_float else int(value))
        pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        packed = (ctypes.c_int64 * len(words))(*words)
        for phase in self.kernel.phases:
            grid = self._function(phase.grid, ctypes.c_int64, ctypes.c_void_p)(packed)
            body = self._function(phase.body, None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
            middle = grid // 2  # run the second half of the grid before the first, as threads might
            body(pointers, packed, middle, grid)
            body(pointers, packed, 0, middle)

    def _function(self, symbol: str, result: Any, *args: Any) -> Callable[..., Any]:
        address = self._loaded.address(symbol)
        assert address, symbol
        return ctypes.CFUNCTYPE(result, *args)(address)


RunNative = Callable[..., None]


@pytest.fixture
def run_native() -> RunNative:
    def run(
        prim: PrimFunc,
        arrays: Sequence[Array],
        dims: Mapping[DimVar, int] | None = None,
        *,
        scalars: Mapping[ScalarParam, float] | None = None,
        target: Target | None = None,
    ) -> None:
        for array in arrays:
            assert array.flags.c_contiguous
        Native(prim, target or host())(arrays, dims, scalars)

    return run
