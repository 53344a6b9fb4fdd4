"""An extent that is symbolic at compile time and 1 at run time is broadcast, in compiled programs as in interpreted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.passes.legalize import legalize
from runtime.errors import ArgumentMismatch
from runtime.session import Session

Compute = Callable[..., Any]


def array(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 40), (40, 1), (40, 40), (0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("where", ["", "where n in 1.."], ids=["any", "n at least 1"])
def test_two_symbolic_extents(compute: Compute, where: str, n: int, m: int) -> None:
    if where and not n:
        return
    text = f"func main(x: f32[n, 17], y: f32[m, 1]) -> object {where} {{ a = add(x, y) b = exp(a) c = multiply(b, x) return c }}"
    assert compute(text, array(n, 17), array(m, 1)).shape == np.broadcast_shapes((n,), (m,)) + (17,)


@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize(
    "text",
    [
        "func main(x: f32[3, 40], y: f32[m]) -> object { z = add(x, y) r = softmax(z) return r }",
        "func main(x: f32[3, 40], y: f32[m]) -> object { c = less(y, 0.0) z = where(c, x, y) return z }",
        "func main(x: f32[3, 40], y: f32[m]) -> object { z = broadcast_to(y, shape[3, 40]) r = add(x, z) return r }",
        "func main(x: f32[3, 40], y: f32[m]) -> object { e = expand_dims(y, axes=[0]) z = add(x, e) return z }",
    ],
    ids=["add", "where", "broadcast_to", "view"],
)
def test_an_extent_beside_a_known_one(compute: Compute, text: str, m: int) -> None:
    compute(text, array(3, 40), array(m))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (5, 1), (5, 5)])
def test_batches_of_matrix_products(compute: Compute, n: int, m: int) -> None:
    text = "func main(a: f32[n, 7, 9], b: f32[m, 9, 33]) -> object { c = matmul(a, b) d = relu(c) return d }"
    assert compute(text, array(n, 7, 9), array(m, 9, 33)).shape == (max(n, m), 7, 33)


@pytest.mark.parametrize("b", [1, 2])
def test_masks_of_attention(compute: Compute, b: int) -> None:
    text = """func main(q: f32[2, 4, 3, 8], k: f32[2, 4, 6, 8], m: f32[b, 1, 3, 6]) -> object {
      y = attention(q, k, k, m, scale=0.5)
      return y
    }"""
    compute(text, array(2, 4, 3, 8), array(2, 4, 6, 8), array(b, 1, 3, 6))


def test_a_chain_of_operators_does_not_nest_what_it_says_of_the_same_extents() -> None:
    names = ["x", *(f"v{i}" for i in range(60))]
    calls = " ".join(f"v{i} = add({names[i]}, {'yx'[i % 2]})" for i in range(60))
    body = parse(f"func main(x: f32[n], y: f32[m]) -> object {{ {calls} return v59 }}").graph("main").body
    assert len({str(b.var.type) for b in body.bindings}) == 1


@pytest.mark.parametrize(("n", "m"), [(3, 4), (0, 4), (4, 0), (2, 3)])
def test_extents_that_do_not_broadcast_are_refused(n: int, m: int) -> None:
    session = Session(compile_module(parse("func main(x: f32[n], y: f32[m]) -> object { z = add(x, y) return z }")), device_threads=1)
    with pytest.raises(
        ArgumentMismatch,
        match=r"main: add 'z', operand \d '[xy]', dimension 0: [nm] is neither 1 nor the extent of the result: expected \d, got \d",
    ):
        session.call("main", array(n), array(m))


def test_a_proved_extent_is_read_without_a_question() -> None:
    module = legalize(parse("func main(x: f32[n, 8], y: f32[n, 1]) -> object where n in 2.. { z = add(x, y) return z }"))
    assert "min(" not in print_module(module) and "match_cast" not in print_module(module)
