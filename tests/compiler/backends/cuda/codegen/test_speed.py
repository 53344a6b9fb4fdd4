"""Tests that read the machine code of a step, without a card, and fail if it has something that makes kernels slow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from compiler.backends.cuda.schedule.attention.walk import SPLIT
from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.wgmma_attend import PART
from compiler.machine.target import get
from runtime.cache_groups import PAGE_SIZE
from tests.lab.sass.facts import LoopFacts, facts_of
from tests.lab.sass.kept_steps import kept_step
from tests.lab.sass.listing import Loop
from tests.lab.sass.model import WARPGROUPS_ATTEND, TileLoops, attend_tile, loops_of_tiles, splits_of
from tests.lab.sass.step import Kernel, ProgramCode, StepCode
from tests.lab.sass.tools import SERIALISED, Assembled, ToolMissing, assemble

pytestmark = pytest.mark.xdist_group("machine code")  # with test_kinds.py and test_cuda_model.py, which read the same code

FORMATS = ("bf16", "int4-128", "int8")
AWAY = 32  # fewest instructions between a load and its first use, in a warp that shares its scheduler with others
BARRIERS_OF_TURNS = 4  # barriers by which two warpgroups that take turns wait for each other; each passes two of them
IN_FLIGHT = 32 << 10  # bytes of weights that a multiprocessor with work should have in flight


@pytest.fixture(params=FORMATS)
def code(request: pytest.FixtureRequest) -> StepCode:
    return kept_step("8b-shape", request.param)


def products(code: StepCode) -> Iterator[tuple[Kernel, TileLoops]]:
    """Yield, for each tile of each product, its kernel and its loops along k."""
    for kernel in code.kernels.values():
        for loops in loops_of_tiles(kernel) if kernel.tiles else []:
            yield kernel, loops


def loops_of(code: StepCode, schedule: str) -> list[LoopFacts]:
    kernels = [kernel for kernel in code.kernels.values() if schedule in kernel.schedule]
    return [facts_of(kernel.listing, loop) for kernel in kernels for loop in kernel.listing.innermost]


def test_nothing_spills_and_products_overlap(code: StepCode) -> None:
    assert [k.name for k in code.kernels.values() if k.usage.spilled_bytes] == []
    assert not SERIALISED.search(code.assembled.said), "the assembler serialised operations that should overlap"


def test_enough_weights_are_in_flight(code: StepCode) -> None:
    """A block of a decode step has enough bytes in flight although there are fewer blocks than multiprocessors, and at least one stage
    is copied while another is multiplied."""
    for kernel, loops in products(code):
        tile = loops.wgmma
        assert tile.ahead >= 1 and facts_of(kernel.listing, loops.producer).copies, kernel.name
        assert tile.rows > 8 or tile.ahead * tile.weight_bytes >= IN_FLIGHT, f"{kernel.name}: {tile}"


def test_no_step_of_a_product_waits_for_memory(code: StepCode) -> None:
    """The loops along k load nothing but scales, and a scale is used only after other weights have been converted."""
    for kernel, loops in products(code):
        facts, copying = (facts_of(kernel.listing, loop) for loop in (loops.consumer, loops.producer))
        assert facts.load_use is None or facts.load_use >= AWAY, f"{kernel.name}, {loops.wgmma.rows} rows: a load is awaited too soon"
        assert facts.barriers <= (BARRIERS_OF_TURNS if loops.wgmma.turns else 0) and not copying.barriers


def test_two_sets_of_registers_hold_weights_of_few_bits(code: StepCode) -> None:
    """While products read weights from registers, the next weights are converted in others."""
    for kernel, loops in products(code):
        tile = loops.wgmma
        if tile.has_scales and tile.fold > 1:
            left = re.compile(r"R\d+, (R\d+), gdesc")
            read = {m[1] for x in kernel.listing.body(loops.consumer) if (m := left.match(x.operands))}
            assert len(read) >= 2 * tile.at_once, f"{kernel.name}, {tile.rows} rows: {sorted(read)}"


def test_rows_of_an_epilogue_are_loaded_together(code: StepCode) -> None:
    """The residual that is added to a product is loaded several rows at a time."""
    for kernel in code.kernels.values():
        if "add" in kernel.name and kernel.tiles:
            listing = kernel.listing
            last = max(loop.end for loop in listing.loops_with("HGMMA"))
            loads = [i for i in range(last, len(listing.instructions)) if listing.instructions[i].kind == "LDG"]
            stores = [i for i in range(last, len(listing.instructions)) if listing.instructions[i].kind == "STG"]
            assert sum(i < stores[0] for i in loads) >= 8, f"{kernel.name} stores before it has loaded eight rows"


def test_attention_has_pages_in_flight(code: StepCode) -> None:
    """Keys are loaded in batches, and so are values of pages in which all keys are seen."""
    keys = [f for f in loops_of(code, "attention") if f.num_loads >= 16]
    assert keys and all(f.loads_in_flight >= 16 for f in keys)


def test_attention_of_long_runs_copies_while_it_multiplies(code: StepCode) -> None:
    """The loop over splits waits for the other warpgroup's turn, and for the warps of its own before it copies. It loads only numbers of
    pages, and copies a stage in each trip."""
    for kernel in code.kernels.values():
        if kernel.schedule == WARPGROUPS_ATTEND and "HGMMA" in kernel.kinds:
            facts = facts_of(kernel.listing, splits_of(kernel))
            assert facts.barriers == 3 and facts.copies >= 2 * attend_tile(kernel).half_bytes // (16 * 128)
            assert facts.num_loads <= SPLIT // PAGE_SIZE


# Kinds of attention that have room for one stage of keys and values: numbers of heads and of kv heads, sizes of keys and values, caps
KINDS_OF_ATTENTION = {
    "heads of 192": (16, 8, 192, 0, 0.0),
    "heads of 256": (8, 4, 256, 0, 0.0),
    "heads of 256, capped": (16, 8, 256, 0, 50.0),
    "latents": (16, 1, 576, 512, 0.0),
}

# Attention with a cap has the loops of attention without one. Assembling it takes ten times as long.
kinds_of_attention = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if "capped" in k else k for k in KINDS_OF_ATTENTION]
)


@cache
def attention(kind: str) -> ProgramCode:
    heads, kv_heads, size, value_size, softcap = KINDS_OF_ATTENTION[kind]
    given = f"q: f32[t, {heads}, {size}], cache: bf16[2, {1 if value_size else 2}, 256, {kv_heads}, {16 * size}], tables: i32[s, p]"
    attributes = f"scale={size**-0.5}, value_size={value_size}, softcap={softcap}"
    body = f"{{ dataflow {{ a = paged_attention(q, cache, tables, ids, at, 1, {attributes}) }} return a }}"
    bounds = "t in 0..2048, s in 0..64, p in 0..256"
    return ProgramCode(parse(f"func main({given}, ids: i32[t], at: i32[t]) -> object where {bounds} {body}"), "sm_90a")


@kinds_of_attention
def test_attention_of_large_heads_copies_parts_while_it_multiplies_others(kind: str) -> None:
    """With one stage, at least two parts are in flight: each is copied for the next split once it has been multiplied. No loop over splits
    keeps numbers on the stack, and products overlap."""
    try:
        code = attention(kind)
    except ToolMissing as missing:
        pytest.skip(str(missing))
    (kernel,) = (k for k in code.kernels.values() if "HGMMA" in k.kinds)
    op, loop = attend_tile(kernel), splits_of(kernel)
    body = kernel.listing.body(loop)
    assert kernel.schedule == WARPGROUPS_ATTEND and op.stages == 1 and op.parts >= 3
    assert not {"LDL", "STL"} & {x.kind for x in body}
    assert not SERIALISED.search(code.assembled.said), "the assembler serialised operations that should overlap"
    multiplies = [i for i, x in enumerate(body) if x.kind == "HGMMA"]
    copies = [i for i, x in enumerate(body) if x.kind == "LDGSTS"]
    assert len([i for i in copies if multiplies[0] < i < multiplies[-1]]) >= 2 * PART * SPLIT * 2 // (16 * 128)


def test_a_norm_waits_for_memory_few_times(code: StepCode) -> None:
    assert all(f.round_trips <= 2 for f in loops_of(code, "rows"))


# --- planted regressions -----------------------------------------------------------------------------------------------

SCALED = """
func main(x: bf16[n, 4096], q: u8[64, 2048], s: bf16[64, 32]) -> object where n in 0..8 {
  dataflow { w = dequantize(q, s, bits=4, group=128) y = linear(x, w, out_dtype="f32") } return y
}
"""


@cache
def ptx() -> str:
    return compile_module(parse(SCALED), Options(get("sm_90a"))).object_code.decode()


def assembled(text: str) -> Assembled:
    try:
        return assemble(text.encode(), "sm_90a")
    except ToolMissing as missing:
        pytest.skip(str(missing))


def facts_of_product(text: str) -> LoopFacts:
    (listing,) = (x for name, x in assembled(text).listings.items() if "linear" in name)
    (loop,) = listing.loops_with("HGMMA")
    return facts_of(listing, loop)


def planted(text: str) -> str:
    """Return the code of the product with `text` inserted before the fence that each turn of the loop executes."""
    fence = "fence.proxy.async.shared::cta;"
    begin = ptx().index(fence, ptx().index(fence) + 1)
    return ptx()[:begin] + text + ptx()[begin:]


def test_a_load_that_is_awaited_at_once_is_noticed() -> None:
    """A value that is loaded in each step and used in the same step is found."""
    before = facts_of_product(ptx())
    assert before.load_use is None or before.load_use >= AWAY
    pointer = re.search(r"ld\.global\.nc\.b64 \t(%rd\d+), \[%rd\d+\+8\];", ptx())
    assert pointer is not None
    load = f"{{ .reg .b32 a; ld.global.b32 a, [{pointer[1]}]; add.u32 a, a, 1; st.global.b32 [{pointer[1]}], a; }}\n\t"
    found = facts_of_product(planted(load))
    assert found.load_use is not None and found.load_use < AWAY and found.round_trips > before.round_trips


def test_a_barrier_that_is_added_to_a_step_is_noticed() -> None:
    assert facts_of_product(planted("bar.sync 0;\n\t")).barriers == facts_of_product(ptx()).barriers + 1


def test_a_product_that_cannot_run_beside_others_is_noticed() -> None:
    """If the accumulators are read before the wait, the assembler serialises the products, and says so."""
    result = re.search(r"wgmma\.mma_async\S+ \{(%r\d+),", ptx())
    assert result is not None
    first = ptx().index("wgmma.commit_group")
    broken = ptx()[:first] + f"{{ .reg .f32 t; mov.f32 t, {result[1]}; add.f32 {result[1]}, t, t; }} " + ptx()[first:]
    assert SERIALISED.search(assembled(broken).said)


@cache
def routing() -> ProgramCode:
    """Return the routing of a mixture of experts, from its hidden states to the rows of its experts."""
    body = """
    x = linear(h, w, out_dtype="f32")
    s = softmax(x)
    e = top_experts(s, k=8)
    g = gather(s, e, axis=1)
    n = sum(g, axes=[1], keepdims=true)
    shares = divide(g, n)
    rows = group_rows(e, count=128)
    out = (shares, rows)"""
    given = "h: bf16[t, 2048], weight w: f32[128, 2048]"
    return ProgramCode(parse(f"func main({given}) -> object where t in 0..2048 {{ dataflow {{ {body} }} return out }}"), "sm_90a")


def test_routing_is_three_kernels_that_wait_seldom() -> None:
    """The product of the router, all that concerns one token, and the grouping of rows. Scores are loaded together, and so are the choices
    of a thread; nothing is in local memory."""
    try:
        kernels = routing().kernels
    except ToolMissing as missing:
        pytest.skip(str(missing))
    assert {k.schedule: k.usage.spilled_bytes for k in kernels.values()} == {"float product": 0, "small rows": 0, "grouping": 0}
    for kernel in kernels.values():
        assert not {"LDL", "STL"} & kernel.kinds, kernel.name
        facts = facts_of(kernel.listing, Loop(0, len(kernel.listing.instructions)))
        assert facts.loads_in_flight >= 4, kernel.name
        if kernel.schedule != "float product":
            assert not [x for x in kernel.listing.innermost if facts_of(kernel.listing, x).round_trips > 1], kernel.name
