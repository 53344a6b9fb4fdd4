"""Mistakes in the kernel of a product by `wgmma`, as it ships, are noticed by the software GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.device.base import Launch
from runtime.device.cuda.region import CudaRegion
from runtime.errors import DeviceFault
from runtime.executable import Executable
from runtime.session import Session
from runtime.vm import regions
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.runtime.device.cuda.test_products import random

pytestmark = needs_pycuda

ROWS, COLUMNS, DEPTH, GROUP = 8, 64, 768, 128
LONG = 1792  # so that thin tiles of bf16, which have deep stages, use them again
MANY_ROWS, MANY_COLUMNS, SHORT = 130, 72, 384  # a cluster of two blocks, and enough steps that stages are used again
BF16 = f"""
func main(x: bf16[n, {LONG}], w: bf16[{COLUMNS}, {LONG}]) -> object where n in 0..{ROWS} {{
  dataflow {{ y = linear(x, w, out_dtype="f32") }} return y
}}
"""
TWO_TILES = BF16.replace(f"[{COLUMNS}, ", f"[{2 * COLUMNS}, ")
INT4 = f"""
func main(x: bf16[n, {DEPTH}], q: u8[{COLUMNS}, {DEPTH // 2}], s: bf16[{COLUMNS}, {DEPTH // GROUP}]) -> object where n in 0..{ROWS} {{
  dataflow {{ w = dequantize(q, s, bits=4, group={GROUP}) y = linear(x, w, out_dtype="f32") }} return y
}}
"""
# Four parts of a block take turns, three times: each stage holds two groups for each part.
THIN = """
func main(x: bf16[n, 1536], q: u8[32, 768], s: bf16[32, 24]) -> object where n in 0..8 {
  dataflow { w = dequantize(q, s, bits=4, group=64) y = linear(x, w, out_dtype="f32") } return y
}
"""
WIDE = f"""
func main(x: bf16[n, {SHORT}], w: bf16[{MANY_COLUMNS}, {SHORT}]) -> object where n in 0..4096 {{
  dataflow {{ y = linear(x, w, out_dtype="f32") }} return y
}}
"""
CHAIN = f"""
func main(x: bf16[n, {DEPTH}], weight w: bf16[{COLUMNS}, {DEPTH}], weight v: bf16[{COLUMNS}, {COLUMNS}]) -> object where n in 0..{ROWS} {{
  dataflow {{ y = linear(x, w) z = linear(y, v, out_dtype="f32") }} return z
}}
"""


@dataclass(frozen=True)
class Mistake:
    old: str  # a pattern in the PTX
    new: str
    fault: str  # part of the fault's message
    number: int | None = None  # which occurrence is replaced; None: all
    program: str = BF16
    blocks: int | None = None  # number of blocks of each launch; None: as many as have work

    def made_in(self, ptx: str) -> str:
        found = list(re.finditer(self.old, ptx))
        assert len(found) > (self.number or 0), f"{self.old} is not in the kernel"
        if self.number is None:
            return re.sub(self.old, self.new, ptx)
        chosen = found[self.number]
        return ptx[: chosen.start()] + chosen.expand(self.new) + ptx[chosen.end() :]


CLUSTER_BARRIER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
RELAXED_BARRIER = CLUSTER_BARRIER.replace(".release", ".relaxed")
OTHER_BLOCK = r"(mapa\.shared::cluster\.u32 far, %r\d+), 1;"
AWAIT = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 p, \[%r\d+\], %r\d+;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, "
BLOCK_BARRIER = r"bar\.sync %r\d+, 256;"
AWAIT_FREE = r"mbarrier\.try_wait\.parity\.acquire\.cluster\.shared::cta\.b64 p, \[%r\d+\], %r\d+;"
ACQUIRE, FAR_ARRIVAL = r"try_wait\.parity\.acquire\.cluster\.", r"arrive\.release\.cluster\.shared::cluster\."
RACE = "a race: writes over"
EARLY = r"reads before griddepcontrol\.wait what launch \d+ wrote"
OVERWRITES = "still reads|a race|where a copy in flight is going to write"
MASK = r"(multicast::cluster .*\]), 3;"
MISTAKES = {
    "no fence between copied rows and tensor cores": Mistake("fence.proxy.async.shared::cta;", "", "without fence.proxy.async", 1),
    "rows announced before they are copied": Mistake(r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64 ", ARRIVE, "copy in flight"),
    "results stored while other warps multiply": Mistake("bar.sync 1, 256;", "", "a race|still reads|hang", 0),
    "a stage filled before it is free": Mistake(AWAIT, "setp.eq.u32 p, 1, 1;", OVERWRITES, 0),
    "a stage multiplied before it is full": Mistake(AWAIT, "setp.eq.u32 p, 1, 1;", "copy in flight", 1),
    "stages that are never free": Mistake(r"mbarrier\.arrive\.shared::cta\.b64 _,.*;", "", "hang"),
    "fewer bytes announced than copied": Mistake(", 16384;", ", 16368;", "hang|in flight"),
    "no wait for panels": Mistake(", 1, 0, p; }", ", 1, 1, p; }", "copy in flight"),
    "no wait for the products of the previous stage": Mistake("wgmma.wait_group.sync.aligned 1;", "", "still reads"),
    "results read before the last product has ended": Mistake("wgmma.wait_group.sync.aligned 0;", "", "has not waited for"),
    "weights converted over those that a product reads": Mistake(
        "wgmma.wait_group.sync.aligned 0; }", "wgmma.wait_group.sync.aligned 2; }", "has not waited for|still reads", program=INT4
    ),
    "sums of the other warpgroup added before they are there": Mistake(BLOCK_BARRIER, "", "a race: reads|hang", 0, INT4),
    "sums passed over others that are not added yet": Mistake(BLOCK_BARRIER, "", "barrier 4 misses threads", 1, INT4),
    "sums that are never announced": Mistake(r"bar\.arrive %r\d+, 256;", "", "hang", program=INT4),
    "sums of other parts added before they are there": Mistake(BLOCK_BARRIER, "", "a race: reads|barrier 2 gets 384", 0, THIN),
    "sums of parts passed over others that are not added yet": Mistake(BLOCK_BARRIER, "", "barrier 4 misses threads", 1, THIN),
    "no barrier of the cluster after its mbarriers are made": Mistake(
        CLUSTER_BARRIER, "bar.sync 0;", "may not have made yet", program=WIDE
    ),
    "the other block is not awaited before its stage is filled": Mistake(
        AWAIT_FREE, "setp.eq.u32 p, 1, 1;", f"{OVERWRITES}|more arrivals in a phase", program=WIDE
    ),
    "a block releases its own stage twice": Mistake(OTHER_BLOCK, r"\1, 0;", "more arrivals in a phase|hang", program=WIDE),
    "a block of another cluster is told": Mistake(OTHER_BLOCK, r"\1, 2;", "rank 2 is not in the cluster", program=WIDE),
    "a stage counts as free when one block has multiplied it": Mistake(
        r"(mbarrier\.init\.shared\.b64 .*\]), 16;", r"\1, 8;", f"more arrivals in a phase|{RACE}", program=WIDE
    ),
    "panels reach only one block": Mistake(MASK, r"\1, 1;", "hang", program=WIDE),
    "only the panels that the block copies itself are announced": Mistake(
        r"(expect_tx.*), 32768;", r"\1, 16384;", "hang|in flight", program=WIDE
    ),
    "a mask that names a block outside of the cluster": Mistake(MASK, r"\1, 7;", "does not name blocks", program=WIDE),
    "mbarriers made without a fence": Mistake(r"fence\.mbarrier_init\.release\.cluster;", "", "may not have made yet", program=WIDE),
    "a barrier of the cluster that releases nothing": Mistake(CLUSTER_BARRIER, RELAXED_BARRIER, "may not have made yet", program=WIDE),
    "a wait that acquires in its block only": Mistake(ACQUIRE, "try_wait.parity.", RACE, program=WIDE),
    "a wait that acquires nothing": Mistake(ACQUIRE, "try_wait.parity.relaxed.cluster.", RACE, program=WIDE),
    "an arrival that releases in its block only": Mistake(FAR_ARRIVAL, "arrive.release.cta.shared::cluster.", RACE, program=WIDE),
    "an arrival that releases nothing": Mistake(FAR_ARRIVAL, "arrive.relaxed.cluster.shared::cluster.", RACE, program=WIDE),
    "a stage released that is not filled again": Mistake(
        rf"(setp\.gt\.s64 \t%p\d+, %rd\d+), {SHORT // 64 - 1};(\s+or\.pred)", r"\1, 99;\2", "nobody waits for", program=WIDE
    ),
    "no wait for the kernels that were launched before": Mistake(r"griddepcontrol\.wait;", "", EARLY, program=CHAIN),
    "a wait after the rows are copied": Mistake(r"griddepcontrol\.wait;", "", EARLY, 2, CHAIN),
    "no fence between a stored result and the panels of the next tile": Mistake(
        "fence.proxy.async.shared::cta;", "", "an asynchronous write .* without fence.proxy.async", 0, TWO_TILES, blocks=1
    ),
}


@cache
def executable(program: str) -> Executable:
    return compile_module(parse(program), Options(get("sm_90a")))


def run(executable: Executable, program: str, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Run a program. Return its result and the expected result."""
    main, rows = parse(program).graph("main"), rows or (MANY_ROWS if program is WIDE else ROWS)
    types = [p.type for p in main.params]
    arrays = [random(i, *(d.const if d.is_const else rows for d in t.shape), dtype=str(t.dtype)) for i, t in enumerate(types)]
    session, num_given = Session(executable), len(arrays) - len(main.weights)
    bind_values(session, executable, "main", dict(zip((p.name for p in main.weights), arrays[num_given:], strict=True)))
    return session.call("main", *arrays[:num_given]), Interpreter(parse(program)).call("main", *arrays)


@pytest.mark.parametrize("program", [BF16, INT4, THIN, WIDE, CHAIN], ids=["bf16", "int4", "thin", "wide", "chain"])
def test_the_kernel_as_it_ships_is_right(program: str, software_gpu: SoftwareGpu) -> None:
    found, expected = run(executable(program), program)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


def limit_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Launch kernels with fewer blocks than there are tiles, so that blocks compute several."""
    monkeypatch.setattr(CudaRegion, "_blocks", lambda region: (blocks,) * len(region._gathers))


@pytest.mark.parametrize(("program", "rows", "blocks"), [(TWO_TILES, ROWS, 1), (WIDE, 300, 2)], ids=["narrow", "wide"])
def test_blocks_compute_several_tiles(
    program: str, rows: int, blocks: int, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card with few multiprocessors, or with many tiles, has more tiles than blocks. The two blocks of a cluster repeat together."""
    limit_blocks(monkeypatch, blocks)
    found, expected = run(executable(program), program, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_a_fault(mistake: Mistake, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake.blocks is not None:
        limit_blocks(monkeypatch, mistake.blocks)
    broken = mistake.made_in(executable(mistake.program).object_code.decode())
    with pytest.raises(DeviceFault):
        run(replace(executable(mistake.program), object_code=broken.encode()), mistake.program)
    assert re.search(mistake.fault, software_gpu.faults[-1]), software_gpu.faults[-1]


def test_weights_that_a_launch_packs_are_not_read_early(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of this program are inputs, which a launch packs before the product. A region that overlaps both is a fault."""
    monkeypatch.setattr(regions, "Launch", lambda *fields: Launch(*fields[:-1], overlaps=True))
    with pytest.raises(DeviceFault):
        run(executable(BF16), BF16)
    assert re.search(EARLY, software_gpu.faults[-1]), software_gpu.faults[-1]
