"""A kernel for a cluster of two blocks on the software GPU: it is right in every order, and each mistake in it is a fault.

The first block copies 32 numbers to the shared memory of both blocks, twice, to the same place. Each block writes what it received to
`out`. Before the second copy, the first block waits until both blocks have read the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.gpu.kernels import Card, ptx_of
from tests.gpu.ptx.faults import Fault

SEEDS = range(8)
FULL, FREE = 128, 136  # offsets of the mbarriers
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1], 128, [$2], 3;"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], 128;"
MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
RELEASE = "{ .reg .b32 far; mapa.shared::cluster.u32 far, $0, 0; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [far]; }"


def asm(text: str, constraints: str = "", arguments: str = "", result: str = "void") -> str:
    """Return a call of assembly. It counts as an access to memory, so that LLVM moves no load or store over it."""
    clobbered = f"{constraints},~{{memory}}".lstrip(",")
    return f'call {result} asm sideeffect "{text}", "{clobbered}"({arguments})'


def wait(name: str, barrier: str, parity: str, after: str) -> str:
    test = f"{{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }} // {name}"
    return f"""  br label %{name}
{name}:
  %{name}_done = {asm(test, "=r,r,r", f"i32 {barrier}, i32 {parity}", "i32")}
  %{name}_no = icmp eq i32 %{name}_done, 0
  br i1 %{name}_no, label %{name}, label %{after}
{after}:"""


READ = """  %own = getelementptr float, ptr addrspace(3) @smem, i32 %t
  %x = load float, ptr addrspace(3) %own
  %row = mul i32 %i, 64
  %column = mul i32 %rank, 32
  %a = add i32 %row, %column
  %b = add i32 %a, %t
  %to = getelementptr float, ptr addrspace(1) %out, i32 %b
  store float %x, ptr addrspace(1) %to
"""
LET_GO = f"""  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  %first = icmp eq i32 %i, 0
  %tells = and i1 %leads, %first
  br i1 %tells, label %release, label %next
release:
  {asm(RELEASE, "r", "i32 %free")}
  br label %next
next:
"""
SAMPLE = f"""
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.cluster.ctarank()
declare void @llvm.nvvm.bar.warp.sync(i32)
@smem = external addrspace(3) global [0 x i8], align 128
define ptx_kernel void @twice(ptr addrspace(1) %in, ptr addrspace(1) %out) "nvvm.maxntid"="32" "nvvm.cluster_dim"="2" {{
entry:
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %rank = call i32 @llvm.nvvm.read.ptx.sreg.cluster.ctarank()
  %base = ptrtoint ptr addrspace(3) @smem to i32
  %full = add i32 %base, {FULL}
  %free = add i32 %base, {FREE}
  %leads = icmp eq i32 %t, 0
  %both = or i32 %t, %rank
  %copies = icmp eq i32 %both, 0
  br i1 %leads, label %make, label %made
make:
  {asm("mbarrier.init.shared.b64 [$0], 1;", "r", "i32 %full")}
  {asm("mbarrier.init.shared.b64 [$0], 2;", "r", "i32 %free")}
  {asm("fence.mbarrier_init.release.cluster;")}
  br label %made
made:
  call void @llvm.nvvm.bar.warp.sync(i32 -1)
  {asm(MEET)}
  br label %round
round:
  %i = phi i32 [0, %made], [%i1, %next]
  br i1 %leads, label %announce, label %receive
announce:
  {asm(EXPECT, "r", "i32 %full")}
  br i1 %copies, label %ready, label %receive
ready:
  %later = icmp ne i32 %i, 0
  br i1 %later, label %until, label %copy
until:
{wait("await_free", "%free", "0", "waited")}
  br label %copy
copy:
  %at = mul i32 %i, 128
  %source = getelementptr i8, ptr addrspace(1) %in, i32 %at
  {asm(COPY, "r,l,r", "i32 %base, ptr addrspace(1) %source, i32 %full")}
  br label %receive
receive:
{wait("await_full", "%full", "%i", "received")}
{READ}{LET_GO}  %i1 = add i32 %i, 1
  %more = icmp ult i32 %i1, 2
  br i1 %more, label %round, label %end
end:
  ret void
}}
"""

AWAIT_FREE = wait("await_free", "%free", "0", "waited")
FIRST_THREAD = "{ .reg .pred q; .reg .b32 r; mov.u32 r, %tid.x; setp.eq.u32 q, r, 0; @q "
OVERWRITES = "a race: writes over"
FIRST_ENDS = (
    "{ .reg .pred q; .reg .b32 r; mov.u32 r, %cluster_ctarank; setp.eq.u32 q, r, 0; @q ret; "
    "mov.u32 r, %tid.x; setp.ne.u32 q, r, 0; @q ret; } "
)


def run(ir: str, seed: int, blocks: int = 2) -> tuple[np.ndarray, np.ndarray]:
    x, card = np.arange(64, dtype=np.float32), Card()
    out = card.empty(512)
    card.run(card.load(ptx_of(ir, "sm_90a")), "twice", blocks, 32, card.upload(x), out, dynamic_bytes=FREE + 8, seed=seed)
    return card.read(out, (2, 2, 32), np.float32), np.repeat(x.reshape(2, 1, 32), 2, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_right_in_every_order(seed: int) -> None:
    got, expected = run(SAMPLE, seed)
    np.testing.assert_array_equal(got, expected)


@dataclass(frozen=True)
class Mistake:
    old: str
    new: str
    fault: str


MISTAKES = {
    "no barrier of the cluster": Mistake(MEET, "", "may not have made yet"),
    "no wait at the barrier of the cluster": Mistake(MEET, MEET.split("; ")[0] + ";", "may not have made yet"),
    "a wait for a barrier at which nobody arrived": Mistake(MEET, MEET.split("; ")[1], "at which it has not arrived"),
    "two arrivals at the barrier of the cluster": Mistake(MEET, MEET.replace("aligned;", "aligned; barrier.cluster.arrive;", 1), "again"),
    "a copy to one block": Mistake("[$2], 3;", "[$2], 1;", "hang"),
    "a copy to a block that is not in the cluster": Mistake("[$2], 3;", "[$2], 5;", "does not name blocks"),
    "no announcement of bytes": Mistake(EXPECT, EXPECT.replace(".expect_tx", "").replace(", 128", ""), "in flight|hang"),
    "no wait until both blocks have read": Mistake("br i1 %later, label %until, label %copy", "br label %copy", "a race: writes over"),
    "a wait for one block": Mistake("[$0], 2;", "[$0], 1;", "more arrivals in a phase|a race: writes over"),
    "a release before the numbers are read": Mistake(READ + LET_GO, LET_GO + READ, "a race: writes over a read"),
    "mbarriers made without a fence": Mistake("fence.mbarrier_init.release.cluster;", "", "made without fence.mbarrier_init"),
    "a barrier of the cluster that releases nothing": Mistake(MEET, MEET.replace("release", "relaxed"), "may not have made yet"),
    "a wait that acquires in its block only": Mistake(AWAIT_FREE, AWAIT_FREE.replace(".acquire.cluster", ""), OVERWRITES),
    "a wait that acquires nothing": Mistake(AWAIT_FREE, AWAIT_FREE.replace("acquire", "relaxed"), OVERWRITES),
    "a release in its block only": Mistake(RELEASE, RELEASE.replace("release.cluster", "release.cta"), OVERWRITES),
    "an arrival that releases nothing": Mistake(RELEASE, RELEASE.replace("release", "relaxed"), OVERWRITES),
    "a release that nobody waits for": Mistake("br i1 %tells, label %release", "br i1 %leads, label %release", "which has ended"),
    "an arrival that begins a phase which nobody awaits": Mistake(
        "end:\n", f"end:\n  {asm(FIRST_THREAD + 'mbarrier.arrive.shared::cta.b64 _, [$0]; }', 'r', 'i32 %free')}\n", "nobody waits for"
    ),
    "an mbarrier made again while an arrival is on its way": Mistake(
        "until:\n", f"until:\n  {asm('mbarrier.init.shared.b64 [$0], 2;', 'r', 'i32 %free')}\n", "lands at another mbarrier"
    ),
    "a rank that is not in the cluster": Mistake("far, $0, 0;", "far, $0, 2;", "rank 2 is not in the cluster"),
    "an arrival at a block that has ended": Mistake(
        "end:\n", f"end:\n  {asm(FIRST_ENDS + RELEASE, 'r', 'i32 %free')}\n", "which has ended"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_a_fault(mistake: Mistake) -> None:
    assert SAMPLE.count(mistake.old) == 1
    with pytest.raises(Fault, match=mistake.fault):
        for seed in SEEDS:
            run(SAMPLE.replace(mistake.old, mistake.new), seed)


def test_a_grid_consists_of_whole_clusters() -> None:
    with pytest.raises(Fault, match="3 blocks do not form clusters of 2"):
        run(SAMPLE, 0, blocks=3)
