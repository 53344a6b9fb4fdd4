"""Products on tensor cores are accurate, and the result of a row has the same bits whatever other rows are in the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cuda.schedule import product
from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]

TARGETS = ("sm_80", "sm_90a")  # products by mma.sync, and by wgmma
COUNTS = (130, 65, 64, 40, 9, 8, 1)  # numbers of rows: the largest needs several blocks, and each tile height occurs


@dataclass(frozen=True)
class Case:
    body: str
    weights: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = ("bf16", "bf16")  # element types of the weights
    rtol: float = 1e-4  # bound on the relative error; larger for bf16 results, which may be rounded the other way

    @property
    def program(self) -> str:
        size, length = self.weights[0]
        length *= 2 if self.dtypes[0] == "u8" else 1  # a byte holds two 4-bit weights
        given = ", ".join(f"weight w{i}: {self.dtypes[i]}[{', '.join(map(str, s))}]" for i, s in enumerate(self.weights))
        return f"""
func main(x: bf16[n, {length}], y: f32[n, {size}], {given}) -> object where n in 0..256 {{
  dataflow {{ {self.body} }}
  return out
}}
"""


CASES = {
    "many steps": Case('a = linear(x, w0, out_dtype="f32") out = add(a, y)', ((200, 640),)),
    "few columns": Case('a = linear(x, w0, out_dtype="f32") out = add(a, y)', ((72, 1792),)),  # thin tiles, whose stages are used again
    "fewer steps than stages": Case('a = linear(x, w0, out_dtype="f32") out = add(a, y)', ((200, 64),)),
    "gated": Case(
        'a = linear(x, w0, out_dtype="f32") s = silu(a) b = linear(x, w1, out_dtype="f32") c = multiply(s, b) out = cast(c, dtype="bf16")',
        ((72, 320), (72, 320)),
        rtol=2**-7,
    ),
    "int8": Case('w = dequantize(w0, w1) a = linear(x, w, out_dtype="f32") out = add(a, y)', ((72, 320), (72, 1)), ("i8", "f32")),
    "fp8": Case(
        'w = dequantize(w0, w1, kind="e4m3") a = linear(x, w, out_dtype="f32") out = add(a, y)', ((72, 320), (72, 1)), ("e4m3", "f32")
    ),
    "fp8 in groups, gated": Case(
        'v = dequantize(w0, w1, group=64, kind="e4m3") w = dequantize(w2, w3, group=64, kind="e4m3") '
        'a = linear(x, v, out_dtype="f32") s = silu(a) b = linear(x, w, out_dtype="f32") out = multiply(s, b)',
        ((72, 128), (72, 2)) * 2,
        ("e4m3", "bf16") * 2,
    ),
    "int4 in groups": Case(
        'w = dequantize(w0, w1, bits=4, group=64) a = linear(x, w, out_dtype="f32") out = add(a, y)', ((130, 160), (130, 5)), ("u8", "bf16")
    ),
    "int4 in short groups, in turns": Case(
        'w = dequantize(w0, w1, bits=4, group=64) a = linear(x, w, out_dtype="f32") out = add(a, y)', ((130, 256), (130, 8)), ("u8", "bf16")
    ),
    "int8 in groups, in turns": Case(
        'w = dequantize(w0, w1, group=64) a = linear(x, w, out_dtype="f32") out = add(a, y)', ((130, 256), (130, 4)), ("i8", "bf16")
    ),
    "fp8 in groups, in turns": Case(
        'w = dequantize(w0, w1, group=64, kind="e4m3") a = linear(x, w, out_dtype="f32") out = add(a, y)',
        ((130, 256), (130, 4)),
        ("e4m3", "bf16"),
    ),
    "int4 in long groups": Case(  # a stage of the widest tile is shorter than a group
        'w = dequantize(w0, w1, bits=4, group=256) a = linear(x, w, out_dtype="f32") out = add(a, y)', ((72, 256), (72, 2)), ("u8", "bf16")
    ),
    "int4 in groups, gated, in turns": Case(
        "v = dequantize(w0, w1, bits=4, group=128) w = dequantize(w2, w3, bits=4, group=128) "
        'a = linear(x, v, out_dtype="f32") s = silu(a) b = linear(x, w, out_dtype="f32") out = multiply(s, b)',
        ((72, 256), (72, 4)) * 2,
        ("u8", "bf16") * 2,
    ),
    "int8 in groups, gated": Case(
        "v = dequantize(w0, w1, group=64) w = dequantize(w2, w3, group=64) "
        'a = linear(x, v, out_dtype="f32") s = silu(a) b = linear(x, w, out_dtype="f32") out = multiply(s, b)',
        ((72, 320), (72, 5)) * 2,
        ("i8", "f32") * 2,
    ),
}


def random(seed: int, *shape: int, dtype: str = "bf16") -> NDArray[Any]:
    rng, holds = np.random.default_rng(seed), DType(dtype).numpy
    if dtype == "e4m3":  # every number, the small ones too
        return rng.choice(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), shape).view(holds)
    if dtype in ("i8", "u8"):
        return rng.integers(*((-128, 128) if dtype == "i8" else (0, 256)), shape).astype(holds)
    return rng.standard_normal(shape).astype(holds)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_near_the_meaning_and_the_same_bits_in_every_batch(case: Case, target: str, software_gpu: SoftwareGpu) -> None:
    check(case, target)


@pytest.mark.parametrize("name", ["int8", "int4 in short groups, in turns", "int4 in groups, gated, in turns"])
def test_a_tile_of_a_lone_block_has_the_bits_of_other_tiles(name: str, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a tile computes 9 to 64 rows of products with many columns. The test takes products with few columns for such ones."""
    monkeypatch.setattr(product, "MANY_COLUMNS", 0)
    check(CASES[name], "sm_90a")


def test_several_tiles_of_lone_blocks_compute_their_own_columns(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three tiles has 88 of its 256 columns. All steps of a sum fit one stage."""
    monkeypatch.setattr(product, "MANY_COLUMNS", 0)
    check(replace(CASES["int8"], weights=((600, 64), (600, 1))), "sm_90a", (64, 40, 8))


def check(case: Case, target: str, counts: tuple[int, ...] = COUNTS) -> None:
    module = parse(case.program)
    executable = compile_module(module, Options(get(target)))
    assert [len(k.phases) for k in executable.meta.kernels] == [1], "expected one launch"
    assert (b"wgmma.mma_async" in executable.object_code) == (target == "sm_90a")
    weights = {f"w{i}": random(i, *shape, dtype=case.dtypes[i]) for i, shape in enumerate(case.weights)}
    x, y = (random(8 + i, counts[0], p.type.shape[1].const, dtype=str(p.type.dtype)) for i, p in enumerate(module.graph("main").params[:2]))
    session = Session(executable)
    bind_values(session, executable, "main", weights)
    meaning = Interpreter(module).call("main", x, y, *weights.values()).astype(np.float32)
    all_rows = session.call("main", x, y)
    np.testing.assert_allclose(all_rows.astype(np.float32), meaning, rtol=case.rtol, atol=1e-5 * abs(meaning).max())
    for count in counts[1:]:
        np.testing.assert_array_equal(session.call("main", x[-count:], y[-count:]), all_rows[-count:])
