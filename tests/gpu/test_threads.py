"""Tests of the threads of a GPU: divergence at branches and reconvergence, shuffles of values, barriers and atomics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.gpu.kernels import Card, ptx_of
from tests.gpu.ptx.faults import Fault, UnknownPtx

PRELUDE = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{
  .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .b16 %rs<9>;
  .shared .align 16 .b8 box[1024];
  .local .align 8 .b8 own[16];
  ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
  mad.lo.s32 %r4, %r2, %r3, %r1;
  mul.wide.u32 %rd3, %r4, 4;
  add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.u32 %r5, [%rd4];
"""
END = "  st.global.u32 [%rd5], %r6; ret; }\n"


def run(body: str, values: np.ndarray, block: int, seed: int = 0, **options: int) -> np.ndarray:
    """Run a PTX body and return the value of %r6 in each thread. In the body, %r5 is the thread's element of `values`, and %r1 the thread's
    number in its block."""
    card = Card(1 << 24)
    source, target = card.upload(values.astype(np.uint32)), card.empty(4 * len(values))
    card.run(card.load(PRELUDE + body + END), "k", len(values) // block, block, source, target, seed=seed, **options)
    return card.read(target, values.shape, np.uint32)


NUMBERS = np.random.default_rng(5).integers(1, 500, 256).astype(np.uint32)


def collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return steps


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loops_of_many_lengths(seed: int) -> None:
    """Threads that leave a loop at different times reconverge after the loop, even if the loop contains a branch."""
    body = """
      mov.u32 %r6, 0;
    $L_loop:
      setp.eq.u32 %p1, %r5, 1;
      @%p1 bra $L_done;
      and.b32 %r7, %r5, 1;
      setp.eq.u32 %p2, %r7, 0;
      @%p2 bra $L_even;
      mad.lo.s32 %r5, %r5, 3, 1;
      bra.uni $L_next;
    $L_even:
      shr.u32 %r5, %r5, 1;
    $L_next:
      add.s32 %r6, %r6, 1;
      bra.uni $L_loop;
    $L_done:
      bar.sync 0;
      shfl.sync.idx.b32 %r8, %r6, 0, 31, -1;
      mad.lo.s32 %r6, %r8, 1000, %r6;
    """
    steps = np.array([collatz(int(n)) for n in NUMBERS])
    assert (run(body, NUMBERS, 64, seed) == steps.reshape(-1, 32)[:, :1].repeat(32, 1).reshape(-1) * 1000 + steps).all()


def test_a_switch() -> None:
    body = """
      and.b32 %r7, %r5, 3; mov.u32 %r6, 7;
      $L_table: .branchtargets $L_a, $L_b, $L_c, $L_d;
      brx.idx %r7, $L_table;
    $L_a: mov.u32 %r6, 10; bra.uni $L_end;
    $L_b: mov.u32 %r6, 20; bra.uni $L_end;
    $L_c: mov.u32 %r6, 30;
    $L_d: add.s32 %r6, %r6, 1;
    $L_end: bar.warp.sync -1;
    """
    assert (run(body, NUMBERS, 32) == np.array([10, 20, 31, 8])[NUMBERS % 4]).all()


@pytest.mark.parametrize(
    ("mode", "source"),
    [
        ("up", lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", lambda lane: lane + 3 if lane < 29 else lane),
        ("bfly", lambda lane: lane ^ 3),
        ("idx", lambda lane: 3),
    ],
)
def test_shuffles(mode: str, source: Callable[[int], int]) -> None:
    clamp = 0 if mode == "up" else 31
    got = run(f"shfl.sync.{mode}.b32 %r6|%p1, %r5, 3, {clamp}, -1;", NUMBERS, 64)
    lanes = np.array([source(lane) for lane in range(32)])
    assert (got.reshape(-1, 32) == NUMBERS.reshape(-1, 32)[:, lanes]).all()


def test_votes_and_reductions() -> None:
    rows = NUMBERS.reshape(-1, 32)
    ballot = run("and.b32 %r7, %r5, 1; setp.ne.u32 %p1, %r7, 0; vote.sync.ballot.b32 %r6, %p1, -1;", NUMBERS, 64)
    assert (ballot.reshape(-1, 32)[:, 0] == (((rows & 1) == 1) << np.arange(32, dtype=np.uint64)).sum(1)).all()
    assert (run("redux.sync.add.u32 %r6, %r5, -1;", NUMBERS, 64).reshape(-1, 32) == rows.sum(1, keepdims=True)).all()
    assert (run("redux.sync.max.u32 %r6, %r5, -1;", NUMBERS, 64).reshape(-1, 32) == rows.max(1, keepdims=True)).all()
    elected = run("elect.sync %r6|%p1, -1; selp.b32 %r6, 1, 0, %p1;", NUMBERS, 64)
    assert (elected.reshape(-1, 32) == [1] + [0] * 31).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_atomics_take_turns(seed: int) -> None:
    """Whatever the order of execution, each thread gets a different number from an atomic add."""
    body = """
      setp.ne.u32 %p1, %r1, 0; mov.u32 %r9, 0;
      @!%p1 st.shared.u32 [box], %r9;
      bar.sync 0;
      atom.shared.add.u32 %r6, [box], 1;
    """
    assert (np.sort(run(body, NUMBERS, 128, seed).reshape(-1, 128), 1) == np.arange(128)).all()


def test_a_maximum_by_compare_and_swap() -> None:
    body = """
      setp.ne.u32 %p1, %r1, 0; mov.u32 %r9, 0;
      @!%p1 st.shared.u32 [box], %r9;
      bar.sync 0;
      ld.volatile.shared.u32 %r10, [box];
    $L_try:
      max.u32 %r11, %r10, %r5;
      atom.shared.cas.b32 %r12, [box], %r10, %r11;
      setp.ne.u32 %p2, %r12, %r10;
      mov.u32 %r10, %r12;
      @%p2 bra $L_try;
      bar.sync 0;
      ld.shared.u32 %r6, [box];
    """
    assert (run(body, NUMBERS, 128).reshape(-1, 128) == NUMBERS.reshape(-1, 128).max(1, keepdims=True)).all()


def test_local_memory_and_generic_addresses() -> None:
    """A generic pointer may point to local, shared or global memory, and the threads of one warp may use pointers to different spaces."""
    body = """
      mov.u64 %rd6, own; cvta.local.u64 %rd6, %rd6;
      mov.u64 %rd7, box; cvta.shared.u64 %rd7, %rd7; add.s64 %rd7, %rd7, 0;
      mul.wide.u32 %rd8, %r1, 4; add.s64 %rd7, %rd7, %rd8;
      add.s32 %r7, %r5, 1; add.s32 %r8, %r5, 2;
      st.u32 [%rd6+4], %r7; st.u32 [%rd7], %r8;
      and.b32 %r9, %r1, 3;
      setp.eq.u32 %p1, %r9, 0; setp.eq.u32 %p2, %r9, 1;
      mov.u64 %rd9, %rd4;
      add.s64 %rd10, %rd6, 4;
      @%p1 mov.u64 %rd9, %rd10;
      @%p2 mov.u64 %rd9, %rd7;
      ld.u32 %r6, [%rd9];
    """
    assert (run(body, NUMBERS, 64) == NUMBERS + np.array([1, 2, 0, 0])[np.arange(256) % 4]).all()


def test_warps_that_wait_for_each_other_across_a_branch() -> None:
    """The kernel ends although the first warp, inside a branch, waits at a barrier where the second warp arrives only after the branch."""
    body = """
      setp.ge.u32 %p1, %r1, 32;
      mov.u32 %r6, %r5;
      @%p1 bra $L_meet;
      bar.sync 1, 64;
      ld.shared.u32 %r6, [box];
    $L_meet:
      @!%p1 bra $L_out;
      mov.u32 %r9, 77;
      setp.ne.u32 %p2, %r1, 32;
      @%p2 bra $L_signal;
      st.shared.u32 [box], %r9;
    $L_signal:
      bar.arrive 1, 64;
    $L_out:
    """
    got = run(body, NUMBERS, 64).reshape(-1, 64)
    assert (got[:, :32] == 77).all()
    assert (got[:, 32:] == NUMBERS.reshape(-1, 64)[:, 32:]).all()


def test_a_trap_ends_the_kernel_where_it_is_taken() -> None:
    body = "setp.eq.u32 %p1, %r5, 0; @%p1 trap; griddepcontrol.wait; mov.u32 %r6, 1;"
    assert (run(body, NUMBERS, 32) == 1).all()
    with pytest.raises(Fault, match="executed a trap"):
        run(body, 0 * NUMBERS, 32)


def test_a_lock_that_is_never_released_is_a_hang() -> None:
    body = "$L_spin: atom.shared.cas.b32 %r7, [box], 0, 1; setp.ne.u32 %p1, %r7, 0; @%p1 bra $L_spin; mov.u32 %r6, 0;"
    with pytest.raises(Fault, match="hang"):
        run(body, NUMBERS[:32], 32, patience=100)


def test_an_instruction_that_no_table_has_is_named() -> None:
    with pytest.raises(UnknownPtx, match=r"tex\.2d\.v4"):
        run("tex.2d.v4.f32.f32 {%r6, %r7, %r8, %r9}, [box, {%r1, %r2}];", NUMBERS, 32)
    with pytest.raises(UnknownPtx, match=r"add\.rz\.f32"):
        run("add.rz.f32 %r6, %r5, %r5;", NUMBERS, 32)
    with pytest.raises(UnknownPtx, match=r"cvt to f16 with \.satfinite"):
        run("cvt.rn.satfinite.f16.f32 %h1, %f1;", NUMBERS, 32)


def test_constants_and_variables_of_a_module() -> None:
    ir = """
@table = internal addrspace(4) constant [4 x i32] [i32 5, i32 6, i32 7, i32 -8], align 4
@count = addrspace(1) global i32 40, align 4
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @k(ptr addrspace(1) %out) {
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %p = getelementptr i32, ptr addrspace(4) @table, i32 %t
  %v = load i32, ptr addrspace(4) %p
  %old = atomicrmw add ptr addrspace(1) @count, i32 %v seq_cst
  %c = load i32, ptr addrspace(1) @count
  %q = getelementptr i32, ptr addrspace(1) %out, i32 %t
  store i32 %c, ptr addrspace(1) %q
  ret void
}
"""
    card = Card(1 << 20)
    out = card.empty(16)
    module = card.load(ptx_of(ir))
    card.run(module, "k", 1, 4, out)
    assert (card.read(out, (4,), np.int32) == 50).all()
    assert card.read(module.globals["count"], (1,), np.int32) == 50
