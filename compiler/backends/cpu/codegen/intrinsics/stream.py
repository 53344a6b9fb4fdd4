"""Write a vector past the caches, for results that none of them would hold until they are read.

A line that is written whole is then not read from memory first, and drives nothing out. On x86-64 other threads may see it
late, until a locked instruction: the one by which a thread tells what it has run (runtime/device/cpu/team.ll).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.llvm.ssa import Code, vec
from compiler.machine.target import Target

LANES = 16
LINE = 64  # bytes: half a line would be read first after all


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    out, lanes = arrays
    out[:LANES] = lanes[:LANES]


def _emit(code: Code, operands: Operands, target: Target) -> None:
    out, lanes = operands.pointers
    value = code.op(f"load {vec('float', LANES)}, ptr {lanes}, align 4")
    offset = code.op(f"and i64 {code.op(f'ptrtoint ptr {out} to i64')}, {LINE - 1}")
    with code.when(code.op(f"icmp eq i64 {offset}, 0")):
        code.do(f"store {vec('float', LANES)} {value}, ptr {out}, align {LINE}, !nontemporal !{{i32 1}}")
    with code.when(code.op(f"icmp ne i64 {offset}, 0")):
        code.do(f"store {vec('float', LANES)} {value}, ptr {out}, align 4")


STREAM = Intrinsic("stream(place, lanes): 16 f32 go to the place, past the caches where it begins a line", _meaning, lambda _: True, _emit)
