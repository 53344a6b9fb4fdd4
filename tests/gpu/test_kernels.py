"""Whole kernels on the software GPU. An unchanged kernel gives the right numbers. A kernel with a mistake is refused or gives wrong
numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from tests.gpu.kernels import Card, ptx_of
from tests.gpu.ptx.faults import Fault
from tests.gpu.samples import COPY_OUT, PIPELINE_SHARED, ROW_SUM, pipeline, tile

Change = Callable[[str], str]
SEEDS = (0, 1, 2, 3)  # 0 runs asynchronous work as late as allowed; other seeds draw random orders
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Sample:
    ir: str
    arch: str
    run: Callable[[str, int], tuple[np.ndarray, np.ndarray]]  # (PTX, seed) -> (actual result, expected result)


def row_sum(ptx: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(0).integers(-99, 99, (5, 128)).astype(np.float32)
    card = Card()
    source, target = card.upload(rows), card.empty(20)
    card.run(card.load(ptx), "row_sum", 5, 128, source, target, seed=seed)
    return card.read(target, (5,), np.float32), rows.sum(1)


def small(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return small integers as bf16; sums of their products are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(BF16)


def tile_product(ptx: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    a, b, card = small((16, 32), 1), small((8, 32), 2), Card()
    out = card.empty(512)
    card.run(card.load(ptx), "tile", 1, 32, card.upload(a), card.upload(b), out, seed=seed)
    return card.read(out, (16, 8), np.float32), a.astype(np.float32) @ b.astype(np.float32).T


def swizzled(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix [rows, k] in the layout of the 128-byte swizzle. The matrix is divided into blocks of 64 columns, and each row of a
    block into chunks of 16 bytes, which are permuted."""
    rows, k = matrix.shape
    blocks = matrix.reshape(rows, k // 64, 8, 8).transpose(1, 0, 2, 3)
    result = np.empty_like(blocks)
    for row in range(rows):
        for chunk in range(8):
            result[:, row, chunk ^ row % 8] = blocks[:, row, chunk]
    return np.ascontiguousarray(result)


def pipelined_product(
    ptx: str, seed: int, pack: Callable[[np.ndarray], np.ndarray] = swizzled, shared: int = PIPELINE_SHARED
) -> tuple[np.ndarray, np.ndarray]:
    w, x, card = small((64, 320), 3), small((8, 320), 4), Card()
    out = card.empty(2048)
    card.run(card.load(ptx), "pipeline", 1, 256, card.upload(pack(w)), card.upload(pack(x)), out, 5, dynamic_bytes=shared, seed=seed)
    return card.read(out, (8, 64), np.float32), x.astype(np.float32) @ w.astype(np.float32).T


def copy_out(ptx: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, card = np.arange(128, dtype=np.float32), Card()
    out = card.empty(512)
    card.run(card.load(ptx), "copy_out", 1, 128, card.upload(x), out, seed=seed)
    return card.read(out, (128,), np.float32), 2 * x


SAMPLES = {
    "row_sum": Sample(ROW_SUM, "sm_80", row_sum),
    "tile": Sample(tile(), "sm_80", tile_product),
    "pipeline": Sample(pipeline(), "sm_90a", pipelined_product),
    "copy_out": Sample(COPY_OUT, "sm_90a", copy_out),
}


@cache
def good(name: str) -> str:
    return ptx_of(SAMPLES[name].ir, SAMPLES[name].arch)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_right_in_every_order(name: str, seed: int) -> None:
    got, expected = SAMPLES[name].run(good(name), seed)
    assert (got == expected).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_right_in_many_orders(name: str) -> None:
    for seed in range(4, 100):
        got, expected = SAMPLES[name].run(good(name), seed)
        assert (got == expected).all(), f"seed {seed}"


def ir(old: str, new: str, count: int = -1) -> Change:
    """Return a change that replaces `old` by `new` in the LLVM IR of a sample."""

    def change(name: str) -> str:
        text = SAMPLES[name].ir
        assert old in text, f"{old} is not in the sample"
        return ptx_of(text.replace(old, new, count), SAMPLES[name].arch)

    return change


def ptx(old: str, new: str, count: int = -1) -> Change:
    """Return a change that replaces `old` by `new` in the PTX of a sample."""

    def change(name: str) -> str:
        assert old in good(name), f"{old} is not in the PTX"
        return good(name).replace(old, new, count)

    return change


BARRIER = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"
WAIT_0 = 'call void asm sideeffect "wgmma.wait_group.sync.aligned 0;", ""()'
ARRIVE = 'call void asm sideeffect "mbarrier.arrive.shared::cta.b64 _, [$0];", "r"(i32 %cempty)'
FENCE = 'call void asm sideeffect "fence.proxy.async.shared::cta;", ""()'
MADE = "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;"
SWIZZLED, PLAIN = 1 << 62 | 64 << 32 | 1 << 16, 64 << 32 | 8 << 16  # matrix descriptors of wgmma
OF_TWO_WARPS = f"""%few = icmp ult i32 %t, 64
  br i1 %few, label %bar, label %on
bar:
  call void asm sideeffect "bar.sync 1, 128;", ""()
  br label %on
on:
  {BARRIER}
  %a0"""
IN_FLIGHT = "reads what a copy in flight is going to write"


@dataclass(frozen=True)
class Sabotage:
    what: str
    sample: str
    change: Change
    message: str  # part of the fault's message; empty if the kernel gives wrong numbers without a fault


SABOTAGE = (
    Sabotage("no barrier", "row_sum", ir(BARRIER, ""), "a race: reads what a write"),
    Sabotage("a barrier in a branch of a lane", "row_sum", ptx("st.shared.b32", "bar.sync 0; st.shared.b32"), "a split warp"),
    Sabotage("a barrier of two warps of four", "row_sum", ir(f"{BARRIER}\n  %a0", OF_TWO_WARPS), "hang"),
    Sabotage(
        "a shuffle in a branch", "row_sum", ptx("st.shared.b32", "shfl.sync.bfly.b32 %r3, %r3, 1, 31, -1; st.shared.b32"), "a split warp"
    ),
    Sabotage("a shared array that is too small", "row_sum", ir("[4 x float]", "[3 x float]"), "outside the"),
    Sabotage("rows too far apart", "row_sum", ir("%row = mul i32 %b, 512", "%row = mul i32 %b, 1024"), "are not all within one"),
    Sabotage("a misaligned load", "row_sum", ir("%row = mul i32 %b, 512", "%row = mul i32 %b, 510"), "is not a multiple of 4"),
    Sabotage("a loop without an end", "row_sum", ptx("bar.sync \t0;", "$L_again: bra.uni $L_again; bar.sync 0;"), "hang"),
    Sabotage("a sum of half of the lanes", "row_sum", ir("i32 16, i32 31", "i32 8, i32 31"), ""),
    Sabotage("no wait for copies", "tile", ptx("cp.async.wait_group 0;", ""), IN_FLIGHT),
    Sabotage("a wait for the wrong group", "tile", ptx("cp.async.wait_group 1;", "cp.async.wait_group 2;"), IN_FLIGHT),
    Sabotage("no barrier behind the wait", "tile", ir("call void @llvm.nvvm.bar.warp.sync(i32 -1)", ""), "a race: reads what a write"),
    Sabotage("a misaligned row of a matrix", "tile", ir("%pa = add i32 %ra32, %ha16", "%pa = add i32 %ra32, 8"), "is not a multiple of 16"),
    Sabotage("a misaligned source of a copy", "tile", ir("%f1 = add i32 %f0, 32", "%f1 = add i32 %f0, 24"), "is not a multiple of 16"),
    Sabotage(
        "both steps in one stage",
        "tile",
        ir("%sa1 = add i32 %to, 768", "%sa1 = add i32 %to, 0"),
        "where a copy in flight is going to write",
    ),
    Sabotage("fragments in the wrong order", "tile", ir("i32 %a01, i32 %a02", "i32 %a02, i32 %a01"), ""),
    Sabotage("a mask that names too few lanes", "tile", ir("bar.warp.sync(i32 -1)", "bar.warp.sync(i32 65535)"), "a split warp"),
    Sabotage("no wait for a stage", "pipeline", ir("br i1 %until_full_no, label %until_full, label %next", "br label %next"), "in flight"),
    Sabotage("stages that are never released", "pipeline", ir(ARRIVE, ""), "hang"),
    Sabotage("a stage released too early", "pipeline", ir(f"{WAIT_0}\n", f"{ARRIVE}\n  {WAIT_0}\n"), "still reads|writes over a read"),
    Sabotage("too few bytes announced", "pipeline", ptx("9216;", "9200;", 1), "hang|in flight"),
    Sabotage("too many bytes announced", "pipeline", ptx("9216;", "9232;", 1), "hang"),
    Sabotage("a copy that is 16 bytes short", "pipeline", ptx("], 8192, [", "], 8176, ["), "hang"),
    Sabotage("a copy of odd bytes", "pipeline", ptx("], 8192, [", "], 8200, ["), "must be multiples of 16"),
    Sabotage("a product that is not awaited", "pipeline", ir(WAIT_0, ""), "still reads"),
    Sabotage(
        "an early look at sums", "pipeline", ptx("wgmma.wait_group", "add.rn.f32 %r48, %r48, %r48; wgmma.wait_group"), "has not waited for"
    ),
    Sabotage("no fence of registers", "pipeline", ptx("wgmma.fence.sync.aligned; ", ""), "written after the last wgmma.fence"),
    Sabotage("an mbarrier that counts too few", "pipeline", ir("i32 128)\n  %i", "i32 127)\n  %i"), "more arrivals in a phase than"),
    Sabotage("an mbarrier that nobody made", "pipeline", ptx("mbarrier.init.shared.b64", "// ", 1), "no mbarrier was initialised"),
    Sabotage("no barrier after mbarriers are made", "pipeline", ir(f"start:\n  {BARRIER}", "start:"), "may not have made yet"),
    Sabotage("mbarriers made without a fence", "pipeline", ir(MADE, ""), "an mbarrier that was made without fence.mbarrier_init"),
    Sabotage("a warpgroup that is split", "pipeline", ir("%mine = lshr i32 %t, 7", "%mine = lshr i32 %t, 6"), "a split warpgroup|hang"),
    Sabotage("the wrong layout", "pipeline", ir(f"%da = or i64 %cal, {SWIZZLED}", f"%da = or i64 %cal, {PLAIN}"), ""),
    Sabotage("no fence of the proxy", "copy_out", ir(FENCE, ""), "without fence.proxy.async"),
    Sabotage("no barrier before a bulk copy", "copy_out", ir(f"{BARRIER}\n  %one", "%one"), "a race: an asynchronous read"),
    Sabotage("a buffer used again too early", "copy_out", ptx("cp.async.bulk.wait_group.read 0;", ""), "still reads"),
)


@pytest.mark.parametrize("case", SABOTAGE, ids=[case.what for case in SABOTAGE])
def test_a_broken_kernel_is_noticed(case: Sabotage) -> None:
    """A kernel with a mistake raises a fault that names the mistake, or gives wrong numbers."""
    broken = case.change(case.sample)
    assert broken != good(case.sample)
    if case.message:
        with pytest.raises(Fault, match=case.message):
            for seed in SEEDS:
                SAMPLES[case.sample].run(broken, seed)
    else:
        got, expected = SAMPLES[case.sample].run(broken, 0)
        assert (got != expected).any()


def test_operands_that_are_not_swizzled_give_wrong_numbers() -> None:
    got, expected = pipelined_product(
        good("pipeline"), 0, pack=lambda m: np.ascontiguousarray(m.reshape(len(m), -1, 64).transpose(1, 0, 2))
    )
    assert (got != expected).any()


def test_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(Fault, match="outside the"):
        pipelined_product(good("pipeline"), 0, shared=PIPELINE_SHARED - 16)
