"""Products on AMX (or on its emulation in amx_unit.c) are close to the interpreter's result, and a row of the result has the same bits in
any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.backends.cpu.schedule.product.widened import AWAKE_ROWS
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.dot_widened import LONGEST
from compiler.machine.products import product_tiles
from compiler.machine.target import Target
from runtime.device.cpu.team import STACK_SPARE
from runtime.executable import Executable
from runtime.session import Session

ROWS = [1, 2, 7, 9, 15, 16, 17, 31, 33, 47, 65]
# K leaves a remainder after several parts along k, and N after several pairs of panels. With a single row, a product with SOME columns
# computes several panels at once. A product with FEW columns computes one panel at a time.
K, N, SOME, FEW = 576, 530, 140, 70

PLAIN = f'func main(x: bf16[m, {K}], w: bf16[{N}, {K}]) -> object {{ y = linear(x, w, out_dtype="f32") return y }}'
TOLERANT = f"""
func main(x: f32[m, {K}], wq: bf16[{N}, {K}], wk: bf16[33, {K}], wv: bf16[{N}, {K}], residual: f32[m, {N}]) -> object {{
  dataflow {{
    q = linear(x, wq, tolerates="bf16") k = linear(x, wk, tolerates="bf16") v = linear(x, wv, tolerates="bf16")
    a = silu(q) b = multiply(a, v) c = add(b, residual) r = (c, k)
  }}
  return r
}}
"""


def quantised(bits: int, group: int, n: int) -> str:
    form = f"bits={bits}, group={group}"
    return f"""
        func main(x: f32[m, {K}], g: f32[{n}, {K}], u: f32[{n}, {K}], residual: f32[m, {n}]) -> object {{
          dataflow {{
            g2 = quantize(g, {form}) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, {form})
            u2 = quantize(u, {form}) uq = u2.0 us = u2.1 ud = dequantize(uq, us, {form})
            a = linear(x, gd, tolerates="bf16") b = linear(x, ud, tolerates="bf16") s = silu(a) p = multiply(s, b) y = add(p, residual)
          }}
          return y
        }}
    """


PROGRAMS = {
    "bf16": (PLAIN, N),
    "gated": (TOLERANT, N),
    "int8": (quantised(8, 0, N), N),
    "int8-64": (quantised(8, 64, SOME), SOME),
    "int4": (quantised(4, 32, FEW), FEW),
    "int4-64": (quantised(4, 64, 33), 33),
}
OF_ROWS = {"bf16": (0,), "gated": (0, 4)}  # program -> indices of the arguments with one entry per row; (0, 3) if not listed
MOST_ROWS = {"bf16": 513, "int4": 545}  # program -> number of rows, which fill one block and leave a remainder


def arguments(program: str, rows: int) -> list[Any]:
    rng, n = np.random.default_rng(0), PROGRAMS[program][1]
    if program == "bf16":
        return [rng.normal(size=s).astype(DType.BF16.numpy) for s in ((rows, K), (n, K))]
    weights = [(n, K), (33, K), (n, K)] if program == "gated" else [(n, K), (n, K)]
    x, *made, residual = (rng.normal(size=s).astype(np.float32) for s in ((rows, K), *weights, (rows, n)))
    if program.startswith("int4"):
        x[1::41, 5] = 400  # these outliers need a second plane; some tiles have such a row, others have none
    return [x, *(w.astype(DType.BF16.numpy) if program == "gated" else w for w in made), residual]


def flat(result: Any) -> np.ndarray:
    return np.concatenate(result if isinstance(result, tuple) else (result,), axis=-1)


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_rows_have_the_same_bits_in_any_batch(
    amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable], program: str
) -> None:
    (text, _), before = PROGRAMS[program], matrix_unit.counts
    args = arguments(program, MOST_ROWS.get(program, ROWS[-1] + 1))
    args[0][[-5, -9], 3], args[0][-7] = (np.inf, np.nan), 0
    executable = compiled(text, amx)

    def of_rows(rows: slice) -> list[Any]:
        return [a[rows].copy() if i in OF_ROWS.get(program, (0, 3)) else a for i, a in enumerate(args)]

    whole = flat(in_threads(executable, 1, args))
    meant = flat(Interpreter(pipeline(amx).until("legalize")(parse(text))).call("main", *of_rows(slice(3))))
    np.testing.assert_allclose(whole[:3], meant, rtol=1e-4, atol=1e-5 * np.abs(meant).max())
    for num_threads, rows in [*((1, rows) for rows in ROWS), (2, 33), (3, 65)]:
        some = flat(in_threads(executable, num_threads, of_rows(slice(-rows, None))))
        np.testing.assert_array_equal(some, whole[-rows:], err_msg=f"{rows} rows, {num_threads} threads")
    assert matrix_unit.library is None or (matrix_unit.counts - before)[-1] > 0


@pytest.mark.parametrize("program", ["bf16", "gated", "int8"])
def test_rows_that_fill_no_tile_read_their_columns_once(
    amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable], program: str
) -> None:
    """Rows that fill no tile are computed as one tile: one row makes the unit load and multiply as many registers as eight rows."""
    if matrix_unit.library is None:
        pytest.skip("a real unit counts no operations")
    executable, counts = compiled(PROGRAMS[program][0], amx), list[list[int]]()
    for rows in (1, 3, 7, 8):
        before = matrix_unit.counts
        in_threads(executable, 1, arguments(program, rows))
        counts.append((matrix_unit.counts - before).tolist())
    assert counts[0][-1] > 0 and counts == counts[:1] * 4


def test_channels_that_fill_no_tile_go_through_vectors(
    amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable]
) -> None:
    before, args = matrix_unit.counts, arguments("int4", 9)
    args = [a[:, : K - 32].copy() if i < 3 else a for i, a in enumerate(args)]
    text = PROGRAMS["int4"][0].replace(f", {K}]", f", {K - 32}]")
    meant = flat(Interpreter(pipeline(amx).until("legalize")(parse(text))).call("main", *args))
    np.testing.assert_allclose(flat(in_threads(compiled(text, amx), 2, args)), meant, rtol=1e-4, atol=1e-5 * np.abs(meant).max())
    assert not (matrix_unit.counts - before).any()


def in_threads(executable: Executable, num_threads: int, args: list[Any]) -> Any:
    session = Session(executable, device_threads=num_threads)
    result = session.call("main", *args)
    session.close()
    return result


def test_a_number_of_rows_that_is_known_when_compiling(amx: Target, compiled: Callable[[str, Target], Executable]) -> None:
    args = arguments("bf16", 70)
    fixed, free = (in_threads(compiled(text, amx), 1, args) for text in (PLAIN.replace("[m,", "[70,"), PLAIN))
    np.testing.assert_array_equal(fixed, free)


WIDENED = """
func main(x: f32[m, 1536], g: f32[64, 1536]) -> object {
  dataflow {
    g2 = quantize(g, bits=4, group=32) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, bits=4, group=32) y = linear(x, gd, tolerates="bf16")
  }
  return y
}
"""


def test_rows_fill_registers_of_one_height(amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable]) -> None:
    """Rows that do not fill the last register share it with rows of the register before it. So the unit is configured once per claim, and
    all rows use the same widened weights."""
    if matrix_unit.library is None:
        pytest.skip("a real unit counts no operations")
    x, w = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((64 + 31, 1536), (64, 1536)))
    executable, before = compiled(WIDENED, amx), matrix_unit.counts
    in_threads(executable, 1, [x, w])
    configured, loads, _, products = (int(n) for n in matrix_unit.counts - before)
    # Each of two claims has a panel, with 24 steps of 64 elements along k in two parts. Three tiles have two registers of rows each.
    claims, steps, parts, tiles = 2, 24, 2, 3
    awake = 1024 // 64  # products that keep the unit awake while the first part is widened
    assert configured == claims
    assert products == claims * (steps * tiles * 4 + awake)
    # Parts after the first continue the sums of the part before, so they also load those sums.
    assert loads == claims * (steps * tiles * 4 + (parts - 1) * tiles * 4)
    x[[40, 95 - 1], 7] = 400
    before = matrix_unit.counts
    in_threads(executable, 1, [x, w])
    assert (matrix_unit.counts - before)[-1] == products + claims * steps * 2 * 4, "two tiles multiply their second planes, too"
    before = matrix_unit.counts
    in_threads(executable, 1, [x[:5].copy(), w])
    assert (matrix_unit.counts - before)[0] == claims


@pytest.mark.parametrize(("rows", "registers"), [(16, 1), (31, 2), (48, 3)])
def test_sums_of_few_rows_stay_in_registers(
    amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable], rows: int, registers: int
) -> None:
    """If the sums of all rows fit in the registers of the unit, they are stored once, and never loaded. The rows have the same bits as in a
    larger batch."""
    x, w = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((49, 1536), (64, 1536)))
    executable = compiled(WIDENED, amx)
    whole, before = in_threads(executable, 1, [x, w]), matrix_unit.counts
    np.testing.assert_array_equal(in_threads(executable, 1, [x[:rows].copy(), w]), whole[:rows])
    if matrix_unit.library is None:
        pytest.skip("a real unit counts no operations")
    configured, loads, stores, products = (int(n) for n in matrix_unit.counts - before)
    claims, steps, awake = 2, 24, -(-rows // AWAKE_ROWS)
    assert configured == claims
    assert stores == claims * registers * 2
    assert products == claims * (steps * registers * 2 + awake)
    # In each step, each register of rows is loaded once, and each of two registers of columns once. With three registers of rows, one
    # register is left for columns: it is loaded four times for the six products.
    assert loads == claims * steps * {1: 3, 2: 4, 3: 7}[registers]


def widened(rows: int, length: int, group: int) -> tuple[str, list[Any]]:
    """Return a program with a product of 4-bit weights, and its arguments. The second row and the last one need two planes."""
    form = f"bits=4, group={group}"
    text = f"""
        func main(x: f32[m, {length}], g: f32[40, {length}]) -> object {{
          dataflow {{ g2 = quantize(g, {form}) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, {form}) y = linear(x, gd, tolerates="bf16") }}
          return y
        }}
    """
    x, w = (np.random.default_rng(rows).normal(size=s).astype(np.float32) for s in ((rows, length), (40, length)))
    x[1, 5], x[-1, 9] = 400, -300
    return text, [x, w]


@pytest.mark.parametrize(("length", "group"), [(576, 32), (1024, 64), (2048, 512), (2048, 1024), (2 * LONGEST + 512, 128)])
def test_few_rows_are_multiplied_in_registers(
    amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable], length: int, group: int
) -> None:
    """A claim with few rows does not use the matrix unit. Its rows have the same bits as in larger batches, and as in the interpreter."""
    tile = product_tiles(amx).widened
    assert tile is not None and tile.few is not None
    text, (x, w) = widened(41, length, group)
    executable = compiled(text, amx)
    whole = in_threads(executable, 2, [x, w])
    few = range(1, tile.few.rows + 1)
    meant = Interpreter(pipeline(amx).until("legalize")(parse(text))).call("main", x[:3], w)
    np.testing.assert_allclose(whole[:3], meant, rtol=1e-6, atol=1e-7 * np.abs(meant).max())
    for rows in (*few, tile.few.rows + 1):
        begin = (41 - rows, 0)[rows % 2]  # the first or the last rows: some batches have rows with two planes, others have none
        before = matrix_unit.counts
        found = in_threads(executable, 1, [x[begin : begin + rows].copy(), w])
        np.testing.assert_array_equal(found, whole[begin : begin + rows], err_msg=f"{rows} rows from {begin}")
        assert matrix_unit.library is None or (matrix_unit.counts - before).any() == (rows not in few)


def test_a_row_alone_has_the_bits_of_its_batch(amx: Target, compiled: Callable[[str, Target], Executable]) -> None:
    """A single row has the same bits as in a batch. A row without finite elements is quantised to arbitrary bytes, for which the code for
    few rows and the unit compute the same sum."""
    text, (x, w) = widened(41, 576, 32)
    x[3], x[4, ::2], x[5] = np.nan, np.inf, 0
    executable = compiled(text, amx)
    whole = in_threads(executable, 1, [x, w])
    for row in range(7):
        np.testing.assert_array_equal(in_threads(executable, 1, [x[row : row + 1].copy(), w]), whole[row : row + 1])


@pytest.mark.parametrize("size", [32, 70])
def test_a_single_row_without_an_axis(amx: Target, compiled: Callable[[str, Target], Executable], size: int) -> None:
    text, (x, w) = widened(41, 576, 32)
    text, w = text.replace("[40,", f"[{size},"), np.resize(w, (size, 576))
    fixed, free = (in_threads(compiled(t, amx), 1, [x[1:2].copy(), w]) for t in (text.replace("[m,", "[1,"), text))
    np.testing.assert_array_equal(fixed, free)


CHOSEN = 576, 70  # elements along k, which leave a remainder after a part; columns
COUNTS = [0, 1, 3, 16, 17, 0, 31, 32, 33, 47, 65, 545]  # rows of each expert; 545 fill a block and leave a remainder
MATRICES = f"{len(COUNTS)}, {CHOSEN[1]}, {CHOSEN[0]}"
EXPERTS = f"""
func main(x: f32[m, {CHOSEN[0]}], g: f32[{MATRICES}], u: f32[{MATRICES}], e: i32[m], b: f32[{len(COUNTS)}, {CHOSEN[1]}]) -> object {{
  dataflow {{
    g2 = quantize(g, bits=4, group=32) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, bits=4, group=32)
    u2 = quantize(u, bits=4, group=64) uq = u2.0 us = u2.1 ud = dequantize(uq, us, bits=4, group=64)
    p = expert_linear(x, gd, e, b, tolerates="bf16") q = expert_linear(x, ud, e, tolerates="bf16") s = silu(p) y = multiply(s, q) r = (y, p)
  }}
  return r
}}
"""


def test_rows_of_experts_have_the_same_bits_in_any_batch(
    amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable]
) -> None:
    """Rows have the same bits in any batch, for experts with no, one, few and many rows. The rows of an expert need not be adjacent."""
    rng, (k, n), before = np.random.default_rng(0), CHOSEN, matrix_unit.counts
    chosen = np.repeat(np.arange(len(COUNTS), dtype=np.int32), COUNTS)
    x = rng.normal(size=(len(chosen), k)).astype(np.float32)
    x[1::41, 5] = 400  # rows that need a second plane
    weights = [rng.normal(size=(len(COUNTS), n, k)).astype(np.float32) for _ in range(2)]
    bias, executable = rng.normal(size=(len(COUNTS), n)).astype(np.float32), compiled(EXPERTS, amx)
    whole = flat(in_threads(executable, 2, [x, *weights, chosen, bias]))
    few = np.concatenate([np.flatnonzero(chosen == expert)[[0, -1]] for expert in np.unique(chosen)])  # interpreting all takes a minute
    meant = flat(Interpreter(pipeline(amx).until("legalize")(parse(EXPERTS))).call("main", x[few], *weights, chosen[few], bias))
    np.testing.assert_allclose(whole[few], meant, rtol=1e-4, atol=1e-5 * np.abs(meant).max())
    some = rng.permutation(len(chosen))
    for rows in (some, some[:100], some[:5], some[:1], np.arange(len(chosen))[::-1][:40]):
        found = flat(in_threads(executable, 1, [x[rows], *weights, chosen[rows], bias]))
        np.testing.assert_array_equal(found, whole[rows])
    assert matrix_unit.library is None or (matrix_unit.counts - before)[-1] > 0


GATED_WIDENED = """
func main(x: f32[m, 256], g: f32[4096, 256], u: f32[4096, 256]) -> object {
  dataflow {
    g2 = quantize(g, bits=4, group=32) gq = g2.0 gs = g2.1 gd = dequantize(gq, gs, bits=4, group=32)
    u2 = quantize(u, bits=4, group=32) uq = u2.0 us = u2.1 ud = dequantize(uq, us, bits=4, group=32)
    a = linear(x, gd, tolerates="bf16") b = linear(x, ud, tolerates="bf16") s = silu(a) y = multiply(s, b)
  }
  return y
}
"""


def test_kernels_say_what_they_keep_on_the_stack(amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable]) -> None:
    """A kernel states how much stack it needs, and uses at most slightly more. Since a kernel may need more stack than the system gives a
    thread, the runtime allocates the stack."""
    executable = compiled(GATED_WIDENED, amx)
    said = executable.meta.stack_bytes
    assert said > 1 << 20
    session = Session(executable, device_threads=1)
    stack = session.device._team._stack
    stack[:] = 0xA5
    x, g, u = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((40, 256), (4096, 256), (4096, 256)))
    session.call("main", x, g, u)
    touched = len(stack) - int(np.argmax(stack != 0xA5))
    assert said // 2 < touched < said + STACK_SPARE // 4


DEEP = 'func main(x: f32[m, 1024], w: bf16[512, 1024]) -> object { y = linear(x, w, tolerates="bf16") return y }'


def test_operands_are_loaded_once_per_product(amx: Target, matrix_unit: Any, compiled: Callable[[str, Target], Executable]) -> None:
    """A block of 2 x 2 tiles loads two tiles of rows and two tiles of columns, and multiplies them in four products. Accumulators are
    loaded once per 512 elements of k."""
    if matrix_unit.library is None:
        pytest.skip("a real unit counts no operations")
    x, w = (np.random.default_rng(0).normal(size=s).astype(DType.BF16.numpy) for s in ((64, 1024), (512, 1024)))
    before = matrix_unit.counts
    found = in_threads(compiled(DEEP, amx), 1, [x.astype(np.float32), w])
    np.testing.assert_allclose(found, x.astype(np.float64) @ w.astype(np.float64).T, atol=1e-3)
    _, loads, stores, products = (int(n) for n in matrix_unit.counts - before)
    assert products == 4 * 32 * 32  # a product multiplies 16 rows by 16 columns over 32 elements of k
    assert loads <= 1.1 * products
    assert stores == products // 16
