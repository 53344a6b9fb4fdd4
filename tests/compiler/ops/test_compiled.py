"""The machine code of every operator computes the same as its definition in NumPy, at sizes that fill some vectors and leave a
remainder."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import compiler.ops
from compiler.ir.op import OPS
from compiler.ops.tables import LEGALIZE

assert compiler.ops  # importing compiler.ops registers all operators

RNG = np.random.default_rng(11)
ROWS, SIZE = 5, 37
X, Y = (RNG.standard_normal((ROWS, SIZE)).astype(np.float32) for _ in range(2))
POSITIVE = np.abs(X) + np.float32(0.1)
ROW = RNG.standard_normal(SIZE).astype(np.float32)
INTS, MORE = (RNG.integers(-50, 50, (ROWS, SIZE)).astype(np.int32) for _ in range(2))
BOOLS = RNG.random((ROWS, SIZE)) < 0.5
WEIGHT = RNG.standard_normal((20, SIZE)).astype(ml_dtypes.bfloat16)
ONE_TEXT, TEXT_ENDS = np.zeros(ROWS, np.int32), np.array([0, ROWS], np.int32)
IDS = RNG.integers(0, ROWS, 9).astype(np.int32)
PLACES = RNG.integers(0, SIZE, (ROWS, 6)).astype(np.int64)
CHOICES = RNG.integers(0, 7, (ROWS, 4)).astype(np.int32)
ORDER = RNG.permutation(4 * ROWS).reshape(ROWS, 4).astype(np.int32)
EXPERTS = RNG.standard_normal((ROWS, 20, SIZE)).astype(ml_dtypes.bfloat16)
HEADS = RNG.standard_normal((3, 4, 8)).astype(np.float32)
CACHE = RNG.standard_normal((2, 2, 6, 2, 16 * 8)).astype(np.float32)
DENSE = RNG.standard_normal((2, 4, 6, 8)).astype(np.float32)
TABLES, SEQUENCES, POSITIONS = np.array([[0, 2], [4, 1]], np.int32), np.array([0, 1, 1], np.int32), np.array([20, 3, 4], np.int32)

ONE = {
    "exp tanh erf sin cos floor round sigmoid silu gelu gelu_tanh relu negative abs softmax log_softmax sort argsort unique nonzero": X,
    "log sqrt rsqrt": POSITIVE,
    "logical_not any all": BOOLS,
    "sum max min prod": INTS,
    "mean": X,
}
TWO = {
    "add subtract multiply minimum maximum less less_equal greater greater_equal equal not_equal": (X, ROW),
    "divide power": (POSITIVE, POSITIVE),
    "floor_divide modulo": (INTS, MORE),
    "logical_and logical_or logical_xor": (BOOLS, BOOLS[::-1].copy()),
}
OTHERS: dict[str, tuple[tuple[Any, ...], str | None, dict[str, Any]]] = {
    "clip": ((X, -0.5, 0.5), "n k", {}),
    "where": ((BOOLS, X, 0.0), "n k, n k", {}),
    "cast": ((X * 300,), "n k", {"dtype": "i8"}),
    "reshape": ((X, (SIZE, "n")), f"n {SIZE}", {}),
    "expand_dims": ((X,), "n k", {"axes": 1}),
    "squeeze": ((X[:1],), "n k", {"axes": 0}),
    "broadcast_to": ((ROW, (3, "k")), "k", {}),
    "permute_dims": ((X,), "n k", {}),
    "flip": ((X,), "n k", {"axes": (0, 1)}),
    "slice": ((X,), "n k", {"axis": 1, "begin": 3, "stride": 2}),
    "split": ((X,), "n 37", {"axis": 1, "sizes": (16, 21)}),
    "concat": ((X, Y[:, :3].copy()), "n k, n j", {"axis": 1}),
    "pad": ((X,), "n k", {"before": (1, 2), "after": (0, 3)}),
    "tril": ((X,), "n k", {"k": 1}),
    "full": (((4, 33), 2.5), None, {"dtype": "bf16"}),
    "arange": ((), None, {"stop": 40, "step": 3, "dtype": "f32"}),
    "shape_to_tensor": (((3, 4, 5),), None, {}),
    "take": ((X, IDS), "n k, m", {"axis": 0}),
    "gather": ((X, PLACES), "n k, n m", {"axis": 1}),
    "scatter": ((X, PLACES, Y[:, :6].copy()), "n k, n m, n m", {"axis": 1}),
    "scatter_inplace": ((X, PLACES, Y[:, :6].copy()), "n k, n m, n m", {"axis": 1}),
    "argmax": ((X,), "n k", {"axis": 1}),
    "argmin": ((X,), "n k", {"axis": 0}),
    "cumsum": ((INTS,), "n k", {"axis": 1}),
    "top_k": ((X,), "n k", {"k": 4}),
    "rms_norm": ((X, ROW), "n k, k", {"eps": 1e-6, "weight_offset": 1.0}),
    "layer_norm": ((X, ROW, ROW), "n k, k, k", {"eps": 1e-5}),
    "linear": ((X, WEIGHT), "n 37, 20 37", {}),
    "matmul": ((X, Y), "n k, m k", {"transpose_b": True}),
    "embedding": ((WEIGHT, IDS), "v 37, n", {}),
    "all_gather": ((X, X), "n k, n k", {"axis": 1}),
    "rank_embedding": ((IDS, WEIGHT[:10].copy(), WEIGHT[10:].copy()), "n, 10 37, 10 37", {"size": 20}),
    "rope_angles": ((POSITIONS, POSITIVE[0]), "t, p", {"scale": 1.5}),
    "rope": ((HEADS, X[:3, :3].copy(), Y[:3, :3].copy()), "t 4 8, t 3, t 3", {}),
    "quantize": ((RNG.standard_normal((ROWS, 64)).astype(np.float32),), "n 64", {"bits": 4, "group": 32, "symmetric": False}),
    "dequantize": ((RNG.integers(0, 256, (ROWS, 32)).astype(np.uint8), POSITIVE[:, :2].copy()), "n 32, n 2", {"bits": 4, "group": 32}),
    **{
        name: (
            (X[:, :32].copy(), POSITIVE[:, :32].copy(), POSITIVE[:, 32:34] / 8, POSITIVE[:, 34:36] / 2),
            "n 32, n 32, n 2, n 2",
            {"group": 16},
        )
        for name in ("refine_groups", "group_errors")
    },
    "round_groups": ((X[:, :32].copy(), POSITIVE[:, 32:34] / 8), "n 32, n 2", {"bits": 6, "group": 16, "shifted": False}),
    "quantize_rows": ((RNG.standard_normal((ROWS, 64)).astype(np.float32),), "n 64", {"bits": 16, "group": 32, "cap": 2.0}),
    "row_planes": ((np.where(RNG.random((ROWS, 160)) < 0.003, 99, RNG.standard_normal((ROWS, 160))).astype(np.float32),), "n 160", {}),
    "panel_integers": ((RNG.integers(0, 256, (20, 32)).astype(np.uint8),), "20 32", {"format": "panel4", "columns": 16}),
    "unpack_blocks": ((RNG.integers(0, 256, (ROWS, 288)).astype(np.uint8),), "n 288", {"format": "q4_k", "part": "numbers"}),
    "panel_blocks": (
        (RNG.integers(0, 256, (20, 288)).astype(np.uint8),),
        "20 288",
        {"of": "q4_k", "format": "panel4", "columns": 16},
    ),
    "look_up": (
        (IDS, RNG.integers(0, 256, (20, 32)).astype(np.uint8), RNG.random((20, 2)).astype(np.float32)),
        "n, 20 32, 20 2",
        {"size": 20, "length": 64, "bits": 4},
    ),
    "panel_scales": ((POSITIVE[:, :2].copy(),), "n 2", {"columns": 4}),
    "integer_linear": (
        (
            RNG.integers(-128, 128, (ROWS, 2, 64)).astype(np.int8),
            POSITIVE[:, :1].copy(),
            RNG.integers(-99, 99, (ROWS, 2, 1)).astype(np.int32),
            RNG.integers(0, 256, (2, 16, 128)).astype(np.uint8),
            RNG.random((2, 1, 32)).astype(np.float32),
        ),
        "n 2 64, n 1, n 2 1, 2 16 128, 2 1 32",
        {"size": 50},
    ),
    "panel_multipliers": ((POSITIVE[:, :2].copy(),), "n 2", {"columns": 4}),
    "widened_linear": (
        (
            RNG.integers(-128, 128, (ROWS, 2, 64)).astype(np.int8),
            POSITIVE[:, :1].copy(),
            RNG.random((ROWS, 1)) < 0.5,
            RNG.integers(0, 256, (2, 8, 128)).astype(np.uint8),
            RNG.integers(-127, 128, (2, 2, 32)).astype(np.int8),
            RNG.random((2, 1, 32)).astype(np.float32),
        ),
        "n 2 64, n 1, n 1, 2 8 128, 2 2 32, 2 1 32",
        {"size": 50},
    ),
    "top_experts": ((np.round(X, 1),), "n 37", {"k": 4}),
    "group_rows": ((CHOICES,), "n 4", {"count": 7}),
    "sum_rows": ((RNG.standard_normal((4 * ROWS, SIZE)).astype(np.float32), ORDER, POSITIVE[:, :4].copy()), "m k, n 4, n 4", {}),
    "expert_linear": ((X[IDS], EXPERTS, IDS, Y[:, :20].copy()), "n 37, 5 20 37, n, 5 20", {}),
    "expert_integer_linear": (
        (
            RNG.integers(-128, 128, (ROWS, 2, 64)).astype(np.int8),
            POSITIVE[:, :1].copy(),
            RNG.integers(-99, 99, (ROWS, 2, 1)).astype(np.int32),
            RNG.integers(0, 256, (3, 2, 16, 128)).astype(np.uint8),
            RNG.random((3, 2, 1, 32)).astype(np.float32),
            RNG.integers(0, 3, ROWS).astype(np.int32),
            RNG.random((3, 50)).astype(np.float32),
        ),
        "n 2 64, n 1, n 2 1, 3 2 16 128, 3 2 1 32, n, 3 50",
        {"size": 50},
    ),
    "expert_widened_linear": (
        (
            RNG.integers(-128, 128, (ROWS, 2, 64)).astype(np.int8),
            POSITIVE[:, :1].copy(),
            RNG.random((ROWS, 1)) < 0.5,
            RNG.integers(0, 256, (3, 2, 8, 128)).astype(np.uint8),
            RNG.integers(-127, 128, (3, 2, 2, 32)).astype(np.int8),
            RNG.random((3, 2, 1, 32)).astype(np.float32),
            RNG.integers(0, 3, ROWS).astype(np.int32),
            RNG.random((3, 50)).astype(np.float32),
        ),
        "n 2 64, n 1, n 1, 3 2 8 128, 3 2 2 32, 3 2 1 32, n, 3 50",
        {"size": 50},
    ),
    "attention": ((DENSE, DENSE[:, :2].copy(), DENSE[:, 2:].copy()), "b 4 t 8, b 2 s 8, b 2 s 8", {"scale": 0.3, "causal": True}),
    "paged_attention": ((HEADS, CACHE, TABLES, SEQUENCES, POSITIONS, 1), "t 4 8, 2 2 p 2 128, s m, t, t", {"scale": 0.3}),
    "kv_append": (
        (CACHE, HEADS[:, :2].copy(), HEADS[:, 2:].copy(), np.array([3, 70, 16], np.int64), 1),
        "2 2 p 2 128, t 2 8, t 2 8, t",
        {},
    ),
    "key_append": ((CACHE[:, :1].copy(), HEADS[:, :2].copy(), np.array([3, 70, 16], np.int64), 1), "2 1 p 2 128, t 2 8, t", {}),
    "state_read": ((X.reshape(1, ROWS, SIZE), IDS, 0), "l p 37, m", {}),
    "state_write": ((X.reshape(1, ROWS, SIZE).copy(), Y[:2], np.array([1, 0], np.int64), 0), "l p 37, m 37, m", {}),
    "state_scan": (
        (
            RNG.standard_normal((1, 3, 4 * 6 * 16)).astype(np.float32),
            *(RNG.standard_normal((ROWS, 2, 6)).astype(np.float32) * 0.3 for _ in "qk"),
            RNG.standard_normal((ROWS, 4, 16)).astype(np.float32),
            RNG.random((ROWS, 4)).astype(np.float32),
            np.array([2], np.int32),
            TEXT_ENDS,
            np.array([0, ROWS - 1], np.int32),
            np.array([1, 2], np.int32),
            0,
            RNG.random((ROWS, 4)).astype(np.float32),
        ),
        "l p 384, t 2 6, t 2 6, t 4 16, t 4, s, u, m, m, t 4",
        {},
    ),
    "conv_taps": ((POSITIVE[:, None],), "n 1 k", {}),
    "causal_conv": ((X, POSITIVE[:3].copy(), X[None, :2].copy(), ONE_TEXT, TEXT_ENDS), "t 37, 3 37, s 2 37, t, u", {}),
    "input_tails": ((X, X[None, :2].copy(), ONE_TEXT, TEXT_ENDS, np.array([0, 2], np.int32)), "t 37, s 2 37, t, u, m", {}),
    "uniform": (((4, 33), 99), None, {}),
}
CASES = {name: ((x,), "n k", {}) for names, x in ONE.items() for name in names.split()}
CASES |= {name: (xs, "n k, " + ("n k" if xs[1].ndim == 2 else "k"), {}) for names, xs in TWO.items() for name in names.split()}
CASES |= OTHERS


def test_every_operator_has_a_case():
    assert set(CASES) <= set(OPS)
    missing = set(LEGALIZE) - set(CASES)
    # operators of these modules are compiled by other tests
    elsewhere = {compiler.ops.attention.ragged.__name__, compiler.ops.sampling.operators.__name__}
    assert all(LEGALIZE[name].__module__ in elsewhere for name in missing), missing


@pytest.mark.parametrize("name", CASES)
def test_machine_code_computes_what_the_operator_means(run, name):
    values, shapes, attrs = CASES[name]
    run(OPS[name], *values, shapes=shapes, compiled=True, **attrs)
