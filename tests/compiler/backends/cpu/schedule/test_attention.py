"""Paged attention gives results close to the interpreter's on every machine, and the output of a token has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Tile
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import canonical_text
from compiler.machine.intrinsics.amx_attend import AmxAttend
from compiler.machine.products import product_tiles
from compiler.machine.target import NAMED, Target, host
from runtime.session import Session
from tests.compiler.backends.cpu.schedule.conftest import HERE

PAGES, KINDS = 96, {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    kind: str = "f32"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    value_size: int = 0  # if not 0, pages have only keys, and values are their beginnings
    exact: bool = False  # queries and weights must not be rounded to bf16
    row_bits: int = 16  # number of bits to which queries and attention weights may be rounded if pages have 8 bits
    image: int = 0  # if not 0, a token sees the last 40 positions, and up to the end of its image: all images have this many positions

    @property
    def halves(self) -> int:
        return 1 if self.value_size else 2

    @property
    def program(self) -> str:
        scales = f", scales: f32[2, {self.halves}, {PAGES}, {self.kv_heads}, 16]" if self.kind == "i8" else ""
        sinks = f", sinks: f32[{self.heads}]" if self.sinks else ""
        extra = (", scales" if scales else "") + (", sinks" if sinks else "")
        q, out = (f"f32[t, {self.heads}, {size}]" for size in (self.size, self.value_size or self.size))
        cache = f"{self.kind}[2, {self.halves}, {PAGES}, {self.kv_heads}, {16 * self.size}]"
        attributes = f"scale=0.2, window={self.window}, softcap={self.softcap}, value_size={self.value_size}"
        attributes += (", exact=true" if self.exact else "") + (", row_bits=8" if self.row_bits == 8 else "")
        return f"""
func main(q: {q}, cache: {cache}, tables: i32[s, p], ids: i32[t], at: i32[t{", 2" if self.image else ""}]{scales}{sinks}) -> {out}
    where t in 0..256, s in 0..8, p in 0..96 {{
  dataflow {{
    out = paged_attention(q, cache, tables, ids, at, 1{extra}, {attributes})
  }}
  return out
}}
"""

    def arguments(self, rng: np.random.Generator, rows: list[tuple[int, int]]) -> list[Any]:
        """Return the operands for rows that are given as (sequence, position). Pages that belong to no sequence are full of NaN."""
        ids, at = np.array(rows, np.int32).reshape(-1, 2).T
        tables = rng.permutation(PAGES)[: 3 * 30].astype(np.int32).reshape(3, 30)  # three sequences of up to 480 positions
        cache = rng.standard_normal((2, self.halves, PAGES, self.kv_heads, 16 * self.size))
        args: list[Any] = [rng.standard_normal((len(rows), self.heads, self.size), np.float32)]
        if self.kind == "i8":
            args.append((cache * 40).clip(-127, 127).astype(np.int8))
        else:
            cache[:, :, np.setdiff1d(np.arange(PAGES), tables)] = np.nan
            args.append(cache.astype(KINDS[self.kind]))
        args += [
            tables,
            ids.copy(),
            np.stack([np.maximum(at - 39, 0), at - at % self.image + self.image - 1], 1) if self.image else at.copy(),
        ]
        if self.kind == "i8":
            args.append((rng.random((2, self.halves, PAGES, self.kv_heads, 16)) * 0.03).astype(np.float32))
        return args + [rng.standard_normal(self.heads).astype(np.float32)] * self.sinks


# Rows of (sequence, position): single tokens, a chunk that crosses a split, a chunk after a long prefix, and a chunk slightly larger than a
# tile.
ROWS = [(0, 299), (2, 0), *((1, p) for p in range(240, 290)), (0, 17), *((2, p) for p in range(33)), *((0, p) for p in range(470, 480))]

CASES = [
    Case(4, 4, 64, "i8", softcap=3.0),
    Case(8, 1, 80, "bf16", sinks=True),
    Case(6, 2, 96, "f16", window=40),
    Case(40, 1, 32, "bf16"),
    Case(3, 3, 5, "f32", window=1),
    Case(16, 1, 48, "bf16", value_size=32),
    Case(2, 1, 28, "f32", value_size=20),
    Case(4, 2, 16, "f32", image=24),
    Case(4, 1, 32, "bf16", image=24, sinks=True),
    Case(4, 2, 64, "i8", image=12),
    Case(4, 4, 64, "i8", row_bits=8),
]
# Slow cases: other sizes and combinations of the options in CASES.
MORE = [
    Case(16, 4, 64),
    Case(5, 1, 128, "bf16", window=300, sinks=True),
    Case(14, 2, 64, "i8", window=33, softcap=2.0),
    Case(8, 4, 256, "f32"),
]


def with_slow(cases: list[Case], slow: list[Case]) -> list[Any]:
    return [*(pytest.param(c, id=str(c)) for c in cases), *(pytest.param(c, id=str(c), marks=pytest.mark.slow) for c in slow)]


@pytest.fixture
def run(session_of: Callable[[str, Target, int], Session]) -> Callable[..., NDArray[np.float32]]:
    def call(case: Case, args: list[Any], rows: slice = slice(None), target: Target | None = None, threads: int = 1) -> NDArray[np.float32]:
        """Run the step with only the given slice of the rows."""
        q, cache, tables, ids, at, *rest = args
        session = session_of(case.program, target or host(), threads)
        return session.call("main", q[rows].copy(), cache, tables, ids[rows].copy(), at[rows].copy(), *rest)

    return call


# The bounds of the largest error and of the root mean square, by the type to which queries and attention weights are rounded before they
# are multiplied.
BOUNDS = {"f32": (4e-5, 4e-6), "i16": (2e-4, 1e-4), "i8": (3e-2, 2e-2), "bf16": (1e-2, 3e-3)}


def rounded_to(case: Case, target: Target) -> str:
    tiles = product_tiles(target)
    if case.kind == "i8" and case.size % 16 == 0 and any(t.format.bits == 8 for t in tiles.integers):
        return f"i{case.row_bits}"
    return "bf16" if case.kind == "bf16" and not case.exact and tiles.pairs is not None else "f32"


def check_near(found: NDArray[np.float32], meaning: NDArray[np.float32], rounding: str) -> None:
    (most, mean), error, scale = BOUNDS[rounding], found - meaning, np.abs(meaning).max()
    assert np.abs(error).max() <= most * scale
    assert np.sqrt(np.mean(error**2)) <= mean * np.sqrt(np.mean(meaning**2))


@pytest.mark.parametrize("case", with_slow(CASES, MORE))
def test_near_the_meaning_and_the_same_bits_everywhere(run: Callable[..., NDArray[np.float32]], case: Case) -> None:
    args, rounding = case.arguments(np.random.default_rng(1), ROWS), rounded_to(case, host())
    meaning = Interpreter(parse(case.program)).call("main", *(a.copy() for a in args))
    whole = run(case, args)
    check_near(whole, meaning, rounding)
    for threads in (2, 3):
        np.testing.assert_array_equal(run(case, args, threads=threads), whole)
    for target in (host(), *filter(lambda t: t.can_run_here, [NAMED["x86-64-v3"]])):
        if rounded_to(case, target) != rounding:
            whole = run(case, args, target=target)
            check_near(whole, meaning, rounded_to(case, target))
        for step in (15, 17, 33, len(ROWS)):
            cuts = [*range(0, len(ROWS), step), len(ROWS)]
            parts = [run(case, args, slice(a, b), target) for a, b in pairwise(cuts)]
            np.testing.assert_array_equal(np.concatenate(parts), whole)
        for row in range(0, len(ROWS), 7):
            np.testing.assert_array_equal(run(case, args, slice(row, row + 1), target)[0], whole[row])


PLAIN = Target("plain", "x86_64", frozenset(["fma", "f16c"]), 128)  # without instructions that multiply integers and add


@pytest.mark.covering("case", "target", together=1)
@pytest.mark.parametrize("target", HERE, ids=lambda target: target.name)
@pytest.mark.parametrize("case", [case for case in CASES if case.kind in ("bf16", "i8")], ids=str)
def test_exact_attention_has_the_same_bits_on_all_targets(run: Callable[..., NDArray[np.float32]], case: Case, target: Target) -> None:
    case = replace(case, exact=True)
    args = case.arguments(np.random.default_rng(6), ROWS)
    whole = run(case, args, target=PLAIN)
    check_near(
        whole, Interpreter(parse(case.program)).call("main", *(a.copy() for a in args)), f"i{case.row_bits}" if case.kind == "i8" else "f32"
    )
    np.testing.assert_array_equal(run(case, args, target=target), whole)


@pytest.mark.parametrize("kind", ["bf16", "i8"])
def test_exact_attention_does_not_use_a_matrix_unit(
    run: Callable[..., NDArray[np.float32]], amx: Target, matrix_unit: Any, kind: str
) -> None:
    case, before = Case(8, 2, 64, kind, exact=True), matrix_unit.counts
    args = case.arguments(np.random.default_rng(6), ROWS)
    np.testing.assert_array_equal(run(case, args, target=amx), run(case, args, target=PLAIN))
    np.testing.assert_array_equal(matrix_unit.counts, before)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_bits_do_not_depend_on_how_long_other_sequences_are(run: Callable[..., NDArray[np.float32]], case: Case) -> None:
    """A row has the same bits whether page tables have room for long sequences or for one split only. With room for one split, the threads
    divide the heads of the few tokens among themselves, and no partial sum goes to the workspace."""
    rows = [(s, p) for p in (0, 31, 200, 255) for s in range(3)]
    args = case.arguments(np.random.default_rng(2), rows)
    beside_long = run(case, args)
    q, cache, tables, *rest = args
    short = [q, cache, tables[:, :16].copy(), *rest]
    for threads in (1, 3):
        for step in (1, 3, len(rows)):
            parts = [run(case, short, slice(a, a + step), threads=threads) for a in range(0, len(rows), step)]
            np.testing.assert_array_equal(np.concatenate(parts), beside_long)


@pytest.mark.parametrize("case", [Case(8, 2, 64), Case(8, 2, 64, "bf16", window=20)], ids=str)
def test_tokens_that_a_row_does_not_see_may_hold_anything(run: Callable[..., NDArray[np.float32]], case: Case) -> None:
    """Keys and values after a row's position or before its window may be NaN: they do not affect the row's result, although other rows of
    the same tile attend to them."""
    positions = np.arange(64)
    args = case.arguments(np.random.default_rng(3), [(0, p) for p in range(64)])
    clean = run(case, args)
    page = args[2][0, 2]  # this page has positions 32 to 47, of which 39 to 41 become NaN
    args[1][1, 0, page].reshape(2, 64, 16)[:, :, 7:10] = np.nan
    args[1][1, 1, page].reshape(2, 16, 64)[:, 7:10] = np.nan
    found, sees = run(case, args), (positions >= 39) & (positions <= 41 + (case.window or 64) - 1)
    np.testing.assert_array_equal(found[~sees], clean[~sees])
    assert np.isnan(found[sees]).all() and len(found[~sees]) == (42 if case.window else 39)


def with_values(case: Case, args: list[Any]) -> tuple[Case, list[Any]]:
    """Return the same attention over pages that also have the values, padded with zeros to the size of a key."""
    q, cache, tables, ids, at, *scales = args
    keys = cache.reshape(*cache.shape[:4], case.size, 16)
    values = np.swapaxes(keys, 4, 5).copy()
    values[..., case.value_size :] = 0
    both = np.concatenate([cache, values.reshape(cache.shape)], 1)
    return replace(case, value_size=0), [q, both, tables, ids, at, *(np.concatenate([s, s], 1) for s in scales)]


@pytest.mark.parametrize(
    "case",
    [Case(16, 1, 48, "bf16", value_size=32), Case(6, 2, 28, "i8", window=40, value_size=20), Case(4, 2, 16, "f32", value_size=16)],
    ids=str,
)
def test_values_in_keys_give_the_bits_of_stored_values(run: Callable[..., NDArray[np.float32]], amx: Target, case: Case) -> None:
    args = case.arguments(np.random.default_rng(4), ROWS)
    beside, given = with_values(case, args)
    for target in (host(), *([amx] if case.kind == "bf16" else ())):
        np.testing.assert_array_equal(run(case, args, target=target), run(beside, given, target=target)[:, :, : case.value_size])


@pytest.mark.parametrize("case", [Case(8, 2, 64, "i8"), Case(8, 2, 64, "i8", window=20), Case(4, 2, 40, "i8", window=20)], ids=str)
@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
def test_scales_that_a_row_does_not_see_may_be_nan(run: Callable[..., NDArray[np.float32]], case: Case, half: int) -> None:
    """The scales of an 8-bit cache may be NaN where a row does not see their keys. Where it does, its result is NaN."""
    positions = np.arange(64)
    args = case.arguments(np.random.default_rng(3), [(0, p) for p in range(64)])
    clean = run(case, args)
    args[5][1, half, args[2][0, 2], :, 7:10] = np.nan  # positions 39 to 41
    found, sees = run(case, args), (positions >= 39) & (positions <= 41 + (case.window or 64) - 1)
    np.testing.assert_array_equal(found[~sees], clean[~sees])
    assert np.isnan(found[sees]).all() and len(found[~sees]) == (42 if case.window else 39)


def test_a_query_with_nan_gives_nan(run: Callable[..., NDArray[np.float32]]) -> None:
    """A NaN in a query is not lost when the query is rounded to integers, and does not affect other rows."""
    case = Case(8, 2, 64, "i8")
    args = case.arguments(np.random.default_rng(4), [(0, p) for p in range(64)])
    clean = run(case, args)
    args[0][20, 3, 5] = -np.nan
    found = run(case, args)
    assert np.isnan(found[20, 3]).all()
    found[20, 3] = clean[20, 3]
    np.testing.assert_array_equal(found, clean)


# --- the tile that multiplies integers ---------------------------------------------------------------------------------


def attention_in(found: dict[str, PrimFunc]) -> list[PrimFunc]:
    """Return the kernels of attention, without those that make safe copies of its indices."""
    return [kernel for name, kernel in found.items() if "clamp_indices" not in name]


def test_pages_of_bytes_are_multiplied_as_integers(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    """Products with an 8-bit cache use the tile of integers that the target has. If the head size is not a multiple of 16, they are in
    f32."""

    def tiles_of(case: Case, target: str) -> set[str]:
        (kernel,) = attention_in(kernels(case.program, target))
        return {s.op.name for s in walk_stmts(kernel.body) if isinstance(s, Tile)} & {"dot_panel", "dot_words", "pack_bytes"}

    fits = Case(4, 2, 64, "i8")
    assert tiles_of(fits, "avx512-bf16-amd") == tiles_of(fits, "amx") == tiles_of(fits, "aarch64-dotprod") == {"dot_panel", "pack_bytes"}
    for target in ("x86-64-v3", "wasm-relaxed", "aarch64-neon", "riscv64"):
        assert tiles_of(fits, target) == {"dot_words", "pack_bytes"}
    assert not tiles_of(Case(4, 2, 40, "i8"), "avx512-bf16-amd")


# --- the tile that multiplies pairs of bf16 ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(4, 2, 40, "i8"), Case(4, 2, 64, "f16"), Case(4, 2, 40, "bf16")], ids=str)
def test_pairs_are_of_bf16(kernels: Callable[..., dict[str, PrimFunc]], case: Case) -> None:
    """The tile that multiplies pairs of bf16 needs bf16 pages and a head size that is a multiple of 16. In cases without them, a target
    that has this tile gets the same kernel as a target that lacks it."""
    (found,), (elsewhere,) = (attention_in(kernels(case.program, target)) for target in ("avx512-bf16-amd", "avx512"))
    assert canonical_text("k", found) == canonical_text("k", elsewhere)


def test_pairs_of_bf16_are_chosen_for_fast_products(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    fits = Case(4, 2, 64, "bf16")
    texts = [canonical_text("k", *attention_in(kernels(fits.program, t))) for t in ("avx512-bf16-amd", "avx512-vnni-bf16", "avx512")]
    assert "dot_bf16_rows" in texts[0] and texts[1] == texts[2]


# --- attention on matrix units -----------------------------------------------------------------------------------------

# Rows of (sequence, position): two full tiles that cross a split for every number of heads per group, a tile that is not full, and single
# tokens.
TILES = [*((1, p) for p in range(236, 300)), *((2, p) for p in range(10)), (0, 479), (2, 0), (0, 17)]
ALONE = [0, 19, 20, 31, 40, 73, 74, 75]

GROUPS = [
    Case(8, 2, 80, "bf16", window=40, sinks=True),
    Case(7, 1, 96, "bf16", softcap=2.0),
    Case(40, 1, 32, "bf16"),
    Case(16, 1, 112, "bf16", value_size=80),
]
MORE_GROUPS = [
    Case(2, 2, 64, "bf16"),
    Case(16, 2, 128, "bf16", window=33),
    Case(16, 1, 256, "bf16"),
]


@pytest.mark.parametrize("case", with_slow(GROUPS, MORE_GROUPS))
def test_a_matrix_unit_is_as_near_and_as_stable(run: Callable[..., NDArray[np.float32]], amx: Target, matrix_unit: Any, case: Case) -> None:
    args, before = case.arguments(np.random.default_rng(1), TILES), matrix_unit.counts
    meaning = Interpreter(parse(case.program)).call("main", *(a.copy() for a in args))
    whole = run(case, args, target=amx, threads=3)
    check_near(whole, meaning, "bf16")
    assert matrix_unit.library is None or (matrix_unit.counts - before)[-1] > 0
    cuts = [0, 33, 66, len(TILES)]
    np.testing.assert_array_equal(np.concatenate([run(case, args, slice(a, b), amx) for a, b in pairwise(cuts)]), whole)
    for row in ALONE:
        np.testing.assert_array_equal(run(case, args, slice(row, row + 1), amx)[0], whole[row])


@pytest.mark.parametrize("window", [0, 90])
def test_a_matrix_unit_merges_splits(run: Callable[..., NDArray[np.float32]], amx: Target, window: int) -> None:
    """On a matrix unit, rows whose keys are in two splits are near the interpreter's, and have the same bits alone as in a batch. They are
    the tokens of tiles on both sides of a limit of splits, and single tokens."""
    case, last = Case(16, 2, 32, "bf16", window=window), 1042
    rows = [(0, p) for p in range(last - 47, last + 1)]
    q, cache, _, ids, at = case.arguments(np.random.default_rng(6), rows)
    tables = np.random.default_rng(7).permutation(PAGES)[None, : last // 16 + 1].astype(np.int32)
    args = [q, np.nan_to_num(cache.astype(np.float32)).astype(cache.dtype), tables, ids, at]
    meaning, whole = Interpreter(parse(case.program)).call("main", *(a.copy() for a in args)), run(case, args, target=amx)
    check_near(whole, meaning, "bf16")
    for threads in (1, 3):
        for row in range(0, len(rows), 6):
            np.testing.assert_array_equal(run(case, args, slice(row, row + 1), amx, threads)[0], whole[row])


def test_a_matrix_unit_is_kept_awake(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    (kernel,) = attention_in(kernels(Case(4, 2, 64, "bf16").program, "amx"))
    assert canonical_text("k", kernel).count("amx_stay_awake") >= 4


@pytest.mark.parametrize(("value_size", "products"), [(0, 4), (32, 2)])
def test_products_of_a_token_prefetch_on_a_matrix_unit(kernels: Callable[..., dict[str, PrimFunc]], value_size: int, products: int) -> None:
    """Products of single tokens prefetch the next page: those with keys in two phases, and those with values if pages have values. Each is
    compiled twice, for whole blocks and for parts of blocks."""
    (kernel,) = attention_in(kernels(Case(4, 2, 64, "bf16", value_size=value_size).program, "amx"))
    assert canonical_text("k", kernel).count("prefetching=true") == 2 * products


def test_on_a_matrix_unit_tokens_behind_a_row_may_hold_anything(run: Callable[..., NDArray[np.float32]], amx: Target) -> None:
    """On a matrix unit, too, tokens after a row's position do not affect the row's result. Their keys or values are NaN here, or their
    values are infinite: infinity times an attention weight of 0 would be NaN."""
    case = Case(8, 2, 64, "bf16")
    args = case.arguments(np.random.default_rng(3), [(0, p) for p in range(64)])
    clean, page = run(case, args, target=amx), args[2][0, 2]  # this page has positions 32 to 47
    for keys, values in ((np.nan, 0.5), (0.5, np.nan), (0.5, np.inf)):
        args[1][1, 0, page].reshape(2, 64, 16)[:, :, 7:] = keys
        args[1][1, 1, page].reshape(2, 16, 64)[:, 7:] = values
        found = run(case, args, target=amx)
        np.testing.assert_array_equal(found[:39], clean[:39])
        np.testing.assert_array_equal(run(case, args, slice(38, 39), target=amx)[0], clean[38])
        assert not np.isfinite(found[39:]).any()


@pytest.mark.parametrize("case", [Case(40, 1, 32, "bf16"), Case(32, 4, 64, "bf16", window=50, softcap=3.0)], ids=str)
def test_adjacent_tiles_of_a_prompt_share_keys(run: Callable[..., NDArray[np.float32]], amx: Target, case: Case) -> None:
    """With many tiles, a thread computes adjacent tiles of a sequence together. Here sequences begin inside of tiles, and between them."""
    rows = [*((0, p) for p in range(100, 180)), *((1, p) for p in range(67)), (2, 5), *((2, p) for p in range(200, 308))]
    args = case.arguments(np.random.default_rng(5), rows)
    whole = run(case, args, target=amx)
    np.testing.assert_array_equal(run(case, args, target=amx, threads=3), whole)
    for step in (16, 37):
        parts = [run(case, args, slice(a, a + step), amx) for a in range(0, len(rows), step)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    for row in range(0, len(rows), 23):
        np.testing.assert_array_equal(run(case, args, slice(row, row + 1), amx)[0], whole[row])


def test_products_skip_keys_that_their_rows_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of the matrix unit leaves out keys that its rows do not see. Here it has the rows of 16 tokens, and a panel has 32 keys."""
    case, taken, meaning = Case(2, 1, 32, "bf16"), list[Sequence[int]](), AmxAttend.meaning

    def spy(op: AmxAttend, arrays: Sequence[NDArray[Any]], dims: Sequence[int]) -> None:
        taken.append(dims)
        meaning(op, arrays, dims)

    monkeypatch.setattr(AmxAttend, "meaning", spy)
    args = case.arguments(np.random.default_rng(0), [(0, p) for p in range(16, 80)])
    Interpreter(pipeline(NAMED["amx"]).until("schedule_kernels")(parse(case.program))).call("main", *args)
    seen, keys, _, earlier = zip(*taken, strict=True)
    assert (seen, keys, earlier) == ((2, 3, 1, 2), (3, 0, 2, 0), (2, 2, 1, 1)), "the last tile comes first"


@pytest.mark.parametrize("value_size", [0, 32])
@pytest.mark.parametrize(("target", "kind"), [("amx", "bf16"), ("avx512-bf16-amd", "bf16"), ("aarch64-dotprod", "i8")])
def test_what_is_scheduled_means_the_same(target: str, kind: str, value_size: int) -> None:
    """The scheduled kernel computes what the unscheduled program computes. The interpreter runs the kernel, so the test covers targets that
    this machine cannot run."""
    case = Case(2, 1, 48, kind, window=30, value_size=value_size)
    args = case.arguments(np.random.default_rng(0), [*((0, p) for p in range(20, 36)), (1, 33)])
    scheduled = pipeline(NAMED[target]).until("schedule_kernels")(parse(case.program))
    meaning, found = (Interpreter(module).call("main", *(a.copy() for a in args)) for module in (parse(case.program), scheduled))
    check_near(found, meaning, rounded_to(case, NAMED[target]))


@pytest.mark.parametrize("case", [Case(4, 2, 64, "i8"), Case(4, 2, 40, "bf16")], ids=str)
def test_a_matrix_unit_takes_pages_of_bf16(kernels: Callable[..., dict[str, PrimFunc]], case: Case) -> None:
    """The schedule for matrix units needs bf16 pages and a head size that is a multiple of 16. In other cases AMX gets the schedule of
    AVX-512 with VNNI."""
    (found,), (elsewhere,) = (attention_in(kernels(case.program, target)) for target in ("amx", "avx512-vnni-bf16"))
    assert canonical_text("k", found) == canonical_text("k", elsewhere)
