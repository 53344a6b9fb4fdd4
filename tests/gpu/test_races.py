"""Races in global memory on the software GPU: right kernels run, and accesses that nothing orders are a fault."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.gpu.kernels import Card
from tests.gpu.ptx.faults import Fault

THREADS, BLOCKS = 64, 2
HEAD = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 data, .param .u64 counter)
{
  .reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<12>; .reg .b16 %rs<4>;
  .shared .align 4 .b8 last[4];
  ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [counter];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
  mad.lo.u32 %r3, %r2, 64, %r1;
  mul.wide.u32 %rd3, %r3, 4; add.s64 %rd3, %rd1, %rd3;
  xor.b32 %r4, %r3, 1;
  mul.wide.u32 %rd4, %r4, 4; add.s64 %rd4, %rd1, %rd4;
  xor.b32 %r5, %r3, 64;
  mul.wide.u32 %rd5, %r5, 4; add.s64 %rd5, %rd1, %rd5;
  and.b32 %r6, %r1, 32; mul.wide.u32 %rd6, %r6, 4; add.s64 %rd6, %rd1, %rd6;
  setp.eq.u32 %p1, %r1, 0;
"""
# Registers with addresses: the thread's own element, that of its neighbour in the warp, and that of a thread of the other block.
OWN, NEAR, FAR, FIRST_OF_WARP = "[%rd3]", "[%rd4]", "[%rd5]", "[%rd6]"
BARRIER, FENCE, FENCE_OF_BLOCK = "bar.sync 0;", "fence.acq_rel.gpu;", "fence.acq_rel.cta;"
COUNT = "atom.relaxed.gpu.global.inc.u32 %r7, [%rd2], 1;"


def store(place: str) -> str:
    return f"st.global.u32 {place}, %r3;"


def load(place: str) -> str:
    return f"ld.global.u32 %r8, {place};"


def last_block(before: str, after: str, by_each: str = "", by_each_after: str = "") -> str:
    """Return a kernel whose last block reads what the other one has written. One thread counts the blocks, with instructions before and
    after; `by_each` and `by_each_after` are executed by every thread before the first barrier and after the second."""
    return f"""
  {store(OWN)} {by_each} {BARRIER}
  @!%p1 bra $MEET;
  {before} {COUNT} {after}
  st.shared.u32 [last], %r7;
$MEET:
  {BARRIER} {by_each_after}
  ld.shared.u32 %r9, [last];
  setp.ne.u32 %p2, %r9, 1;
  @%p2 bra $END;
  {load(FAR)}
$END:
"""


def passed_on(to_second: str, fence_of_other_thread: str, to_third: str) -> str:
    """Return a kernel in which a second block tells a third one that the first one has written. In the second block, one thread waits for
    the flag of the first block, and another one sets the flag of the third block: `fence_of_other_thread` is what it executes between the
    barrier and that. `to_second` and `to_third` are the scopes of the stores that set the flags."""
    return f"""
  setp.eq.u32 %p2, %r2, 0; @!%p2 bra $SECOND;
  {store(OWN)} {BARRIER} @!%p1 bra $END; {FENCE} st.relaxed.{to_second}.global.u32 [%rd2+4], 1; bra $END;
$SECOND:
  setp.eq.u32 %p2, %r2, 1; @!%p2 bra $THIRD;
  @!%p1 bra $MEET;
$WAIT:
  ld.relaxed.gpu.global.u32 %r7, [%rd2+4]; setp.ne.u32 %p2, %r7, 1; @%p2 bra $WAIT;
  {FENCE}
$MEET:
  setp.eq.u32 %p3, %r1, 32;
  @%p3 fence.acq_rel.gpu;
  {BARRIER}
  @!%p3 bra $END;
  {fence_of_other_thread} st.relaxed.{to_third}.global.u32 [%rd2+8], 1; bra $END;
$THIRD:
  @!%p1 bra $END;
$AGAIN:
  ld.relaxed.gpu.global.u32 %r7, [%rd2+8]; setp.ne.u32 %p2, %r7, 1; @%p2 bra $AGAIN;
  {FENCE} ld.global.u32 %r8, [%rd1+20];
$END:
"""


RIGHT = {
    "each thread its own element": store(OWN) + load(OWN) + store(OWN),
    "a neighbour's element, after a barrier": store(OWN) + BARRIER + load(NEAR) + BARRIER + store(OWN),
    "a neighbour's element, after a barrier of the warp": store(OWN) + "bar.warp.sync -1;" + load(NEAR),
    "a write over what others have read, and the thread itself after a barrier": (
        f"{load(NEAR)} {BARRIER} @!%p1 bra $END; {load(OWN)} {store(OWN)} $END:"
    ),
    "many read what nobody writes": load(FIRST_OF_WARP) + load(NEAR) + load(FAR),
    "halves of a word": "mul.wide.u32 %rd7, %r3, 2; add.s64 %rd7, %rd1, %rd7; mov.b16 %rs1, 7; st.global.b16 [%rd7], %rs1;",
    "a constant that nobody writes": "ld.global.nc.u32 %r8, [%rd4];",
    "the last block reads what the others have written": last_block(FENCE, FENCE),
    "a signal that releases and a fence": last_block("fence.sc.gpu;", "membar.gl;"),
    "counted atomics of all threads": COUNT,
    "a block passes on what another one has written": passed_on("gpu", FENCE, "gpu"),
}
RACE = "a race in global memory: "
WRONG = {
    "a read of a neighbour's element": (store(OWN) + load(NEAR), RACE + r"reads what thread \d+ of block \d wrote"),
    "a write over what a neighbour read": (load(NEAR) + store(OWN), RACE + r"writes over what thread \d+ of block \d read"),
    "a write over what a neighbour wrote": (store(OWN) + store(NEAR), RACE + r"writes over what thread \d+ of block \d wrote"),
    "a write over what many read": (load(FIRST_OF_WARP) + BARRIER + load(FIRST_OF_WARP) + store(OWN), RACE + "writes over what"),
    "several threads write an element": (store(FIRST_OF_WARP), "writes at the same time as thread"),
    "a barrier of the warp between warps": (
        f"{store(OWN)} bar.warp.sync -1; xor.b32 %r10, %r3, 32; mul.wide.u32 %rd7, %r10, 4; add.s64 %rd7, %rd1, %rd7; {load('[%rd7]')}",
        RACE + r"reads what thread \d+ of block \d wrote",
    ),
    "a read of another block's element": (store(OWN) + BARRIER + load(FAR), RACE + r"reads what thread \d+ of block \d wrote"),
    "a write over what another block read": (load(FAR) + BARRIER + store(OWN), RACE + r"writes over what thread \d+ of block \d read"),
    "a constant that the launch has written": (store(OWN) + "ld.global.nc.u32 %r8, [%rd3];", "reads as a constant what the launch writes"),
    "a constant that the launch writes later": (
        "ld.global.nc.u32 %r8, [%rd3];" + store(OWN),
        "writes what the launch has read as a constant",
    ),
    "a signal without a fence before it": (last_block("", FENCE), RACE + r"reads what thread \d+ of block \d wrote"),
    "a signal without a fence after it": (last_block(FENCE, ""), RACE + r"reads what thread \d+ of block \d wrote"),
    "fences of the block alone": (last_block(FENCE_OF_BLOCK, FENCE_OF_BLOCK), RACE + r"reads what thread \d+ of block \d wrote"),
    "a fence in front of the barrier before the signal": (
        last_block("", FENCE, by_each=FENCE),
        RACE + r"reads what thread \d+ of block \d",
    ),
    "a fence behind the barrier after the signal": (
        last_block(FENCE, "", by_each_after=FENCE),
        RACE + r"reads what thread \d+ of block \d",
    ),
    "an atomic of the block's scope": (
        last_block(FENCE, FENCE).replace("atom.relaxed.gpu", "atom.relaxed.cta"),
        RACE + r"reads what thread \d+ of block \d wrote",
    ),
    "a strong store of the block's scope": (passed_on("cta", FENCE, "gpu"), RACE + "reads what thread 5 of block 0 wrote"),
    "a strong load of the block's scope": (
        passed_on("gpu", FENCE, "gpu").replace("ld.relaxed.gpu", "ld.relaxed.cta"),
        RACE + "reads what thread 5 of block 0 wrote",
    ),
    "a signal that passes on what came after the fence before it": (
        passed_on("gpu", "", "gpu"),
        RACE + "reads what thread 5 of block 0 wrote",
    ),
}


def run(body: str, seed: int) -> None:
    card = Card(1 << 20)
    blocks = 3 if "$THIRD" in body else BLOCKS
    data = card.upload(np.zeros(THREADS * blocks, np.uint32))
    module = card.load(f"{HEAD}{body} ret; }}\n")
    for _ in range(2):  # what one launch writes, the next one may read
        counter = card.upload(np.zeros(3, np.uint32))  # and two flags
        card.run(module, "k", blocks, THREADS, data, counter, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("body", RIGHT.values(), ids=list(RIGHT))
def test_accesses_that_are_ordered_are_right(body: str, seed: int) -> None:
    run(body, seed)


@pytest.mark.parametrize(("body", "fault"), WRONG.values(), ids=list(WRONG))
def test_a_race_is_a_fault(body: str, fault: str) -> None:
    with pytest.raises(Fault) as found:
        run(body, 0)
    assert re.search(fault, str(found.value)), found.value
