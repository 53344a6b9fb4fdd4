"""Check that a GPU gives a row of a product the same bits whatever the number of rows, before a model relies on it.

The number of rows decides with which shape of their instruction the tensor cores multiply the rows. NVIDIA does not document in which order
an instruction adds products, nor how it rounds. So a load multiplies rows by small matrices with every shape. The rows have numbers of
mixed magnitudes, and products that cancel, so that the bits of the sums show the order. If a row's bits differ, the model runs the code of
an older generation of GPUs, whose products have one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dtypes import DType
from compiler.machine.target import GPU, Target, gpu_targets
from deploy.cache import Kept
from deploy.model_loading.program import compile_model
from runtime.device.cuda.card import capability_of

COLUMNS, DEPTH = 128, 64
PROGRAM = f"""
func main(x: bf16[n, {DEPTH}], w: bf16[{COLUMNS}, {DEPTH}], q: i8[{COLUMNS}, {DEPTH}], s: f32[{COLUMNS}, 1]) -> object where n in 0..256 {{
  dataflow {{
    a = linear(x, w, out_dtype="f32")
    v = dequantize(q, s)
    b = linear(x, v, out_dtype="f32")
    both = (a, b)
  }}
  return both
}}
"""
RESULTS = ("bf16", "int8")  # formats of the weights whose products the program returns, in order

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Trusted:
    """The target for which a model is compiled."""

    target: Target
    note: str = ""  # why this is not the requested target; "" if it is


def trusted(target: Target, number: int, cache: Kept | None, source: str) -> Trusted:
    """Return the target if products on GPU `number` give a row the same bits in every batch, otherwise the latest target whose products
    have one shape. Return a target of a CPU unchanged. The cache keeps the program of the check, and remembers `source`, the model for
    which the program was compiled."""
    if target.system != GPU:
        return Trusted(target)
    from compiler.machine.products import product_tiles

    heights = product_tiles(target).shapes_of_rows
    differing = differences(target, heights, number, cache, source) if heights else []
    if not differing:
        return Trusted(target)
    plain = next(t for t in reversed(gpu_targets(capability_of(number))) if not product_tiles(t).shapes_of_rows)
    found = f"on this GPU the bits of a row depend on the number of rows ({', '.join(differing)})"
    return Trusted(plain, f"{found}, so the model runs code for {plain.name}, whose products have one shape, instead of {target.name}")


def differences(target: Target, heights: tuple[int, ...], number: int, cache: Kept | None, source: str) -> list[str]:
    """Multiply rows on GPU `number`, once all together and once for each number of rows in `heights`. Return, in words, the products and
    the numbers of rows with which a row has other bits than in the largest batch."""
    from compiler.ir.text.parser import parse

    program = compile_model(parse(PROGRAM), None if cache is None else cache.executables, target)
    session = program.session(cache, source, number)
    x, weights = operands(heights[-1] + 1)
    whole = session.call("main", x, *weights)
    found: list[str] = []
    for count in heights:
        some = session.call("main", x[-count:], *weights)
        for name, part, all_rows in zip(RESULTS, some, whole, strict=True):
            if part.tobytes() != all_rows[-count:].tobytes():
                found.append(f"{count} rows by {name}")
    session.close()
    return found


def operands(num_rows: int) -> tuple[Array, tuple[Array, Array, Array]]:
    """Return rows, and the same weights as bf16 and as integers with scales."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, DEPTH))
    x[1::3] *= 2.0 ** rng.integers(-24, 25, x[1::3].shape)
    x[2::3, 1::2] = -x[2::3, ::2]
    q = rng.integers(-127, 128, (COLUMNS, DEPTH)).astype(np.int8)
    q[: COLUMNS // 2, 1::2] = q[: COLUMNS // 2, ::2]  # pairs of products cancel where both neighbours are equal
    bf16 = DType.BF16.numpy
    return x.astype(bf16), (q.astype(bf16), q, np.ones((COLUMNS, 1), np.float32))
