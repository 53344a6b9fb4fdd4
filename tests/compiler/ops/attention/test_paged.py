"""Attention over KV pages, and attention over dense keys and values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import ScalarType, TensorType, tensor
from compiler.ops.attention.dense import ATTENTION
from compiler.ops.attention.kv_cache import KEY_APPEND, KV_APPEND, PAGE
from compiler.ops.attention.paged import PAGED_ATTENTION

F32, I32, I64 = DType.F32, DType.I32, DType.I64
T, S = DimVar("t"), DimVar("s")
bf16 = np.dtype(ml_dtypes.bfloat16)
HEADS, KV_HEADS, SIZE, LAYERS, PAGES = 4, 2, 3, 2, 6


def one_row(q, k, v, *, scale, softcap=0.0, sink=None):
    """Return the attention output of one query head, given the keys and values that the query may see."""
    score = k @ q * scale
    score = softcap * np.tanh(score / softcap) if softcap else score
    e = np.exp(score)
    return e @ v / (e.sum() + (0 if sink is None else np.exp(sink)))


# --- attention over KV pages -------------------------------------------------------------------------------------------


@pytest.fixture
def paged(meaning, rng):
    """Return a cache with two sequences of 21 and 5 tokens, and the operands of a step that queries their last tokens and some earlier
    ones."""
    lengths, tables = (21, 5), np.array([[3, 1], [4, 0]], np.int32)
    keys = [rng.standard_normal((n, KV_HEADS, SIZE)).astype(np.float32) for n in lengths]
    values = [rng.standard_normal((n, KV_HEADS, SIZE)).astype(np.float32) for n in lengths]
    cache = np.zeros((LAYERS, 2, PAGES, KV_HEADS, PAGE * SIZE), np.float32)
    for s, n in enumerate(lengths):
        slots = np.array([tables[s, p // PAGE] * PAGE + p % PAGE for p in range(n)], np.int64)
        cache = meaning(KV_APPEND, cache, keys[s], values[s], slots, 1)
    seq_ids, positions = np.array([0, 1, 0, 1, 0], np.int32), np.array([20, 4, 15, 0, 16], np.int32)
    q = rng.standard_normal((len(positions), HEADS, SIZE)).astype(np.float32)
    return q, cache, tables, seq_ids, positions, keys, values


@pytest.mark.parametrize("attrs", [{}, {"window": 5}, {"softcap": 1.5}, {"window": 1}], ids=str)
@pytest.mark.parametrize("shapes", [None, "t 4 3, l 2 p 2 48, s m, t, t", "t 4 3, l c p 2 48, s m, u, w"])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_paged_attention(run, rng, paged, attrs, shapes, with_sinks):
    q, cache, tables, seq_ids, positions, keys, values = paged
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    extra = (sinks,) if with_sinks else ()
    found = run(PAGED_ATTENTION, q, cache, tables, seq_ids, positions, 1, *extra, scale=0.7, shapes=shapes, **attrs)
    for t, (s, p) in enumerate(zip(seq_ids, positions, strict=True)):
        seen = slice(max(0, p - attrs["window"] + 1) if "window" in attrs else 0, p + 1)
        for h in range(HEADS):
            k, v = keys[s][seen, h // 2], values[s][seen, h // 2]
            sink = sinks[h] if with_sinks else None
            expected = one_row(q[t, h], k, v, scale=0.7, softcap=attrs.get("softcap", 0.0), sink=sink)
            np.testing.assert_allclose(found[t, h], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shapes", [None, "t 4 3, l 2 p 2 48, s m, t, t 2", "t 4 3, l c p 2 48, s m, u, w 2"])
def test_positions_may_say_what_a_token_sees(run, paged, shapes):
    q, cache, tables, seq_ids, _, keys, values = paged
    spans = np.array([[3, 20], [0, 4], [7, 19], [2, 2], [0, 16]], np.int32)
    found = run(PAGED_ATTENTION, q, cache, tables, seq_ids, spans, 1, scale=0.7, shapes=shapes)
    for t, (s, (first, last)) in enumerate(zip(seq_ids, spans, strict=True)):
        for h in range(HEADS):
            k, v = (of[s][first : last + 1, h // 2] for of in (keys, values))
            np.testing.assert_allclose(found[t, h], one_row(q[t, h], k, v, scale=0.7), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("shapes", [None, "t 4 3, l c p 2 48, s m, t, t"])
def test_a_value_may_be_the_beginning_of_its_key(run, rng, paged, shapes):
    """This also holds if dimension 1 of the cache is symbolic (1: keys only; 2: keys and values)."""
    q, cache, tables, seq_ids, positions, keys, _ = paged
    operands = q, cache[:, :1].copy(), tables, seq_ids, positions, 1
    found = run(PAGED_ATTENTION, *operands, scale=0.7, value_size=2, shapes=shapes, compiled=True)
    assert found.shape == (len(positions), HEADS, 2)
    for t, (s, p) in enumerate(zip(seq_ids, positions, strict=True)):
        for h in range(HEADS):
            k = keys[s][: p + 1, h // 2]
            np.testing.assert_allclose(found[t, h], one_row(q[t, h], k, k[:, :2], scale=0.7), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, bf16, np.int8])
def test_appended_keys_alone_are_those_of_keys_and_values(run, rng, dtype):
    k, slots = rng.standard_normal((3, KV_HEADS, SIZE)).astype(np.float32), np.array([3, 70, 16], np.int32)
    both = np.zeros((LAYERS, 2, PAGES, KV_HEADS, PAGE * SIZE), dtype)
    scales = (np.zeros((LAYERS, 2, PAGES, KV_HEADS, PAGE), np.float32),) if dtype == np.int8 else ()
    wanted = run(KV_APPEND, both, k, k, slots, 1, *scales)
    found = run(KEY_APPEND, both[:, :1].copy(), k, slots, 1, *(s[:, :1].copy() for s in scales))
    for of_both, of_keys in zip(*((x if scales else (x,)) for x in (wanted, found)), strict=True):
        np.testing.assert_array_equal(of_keys, of_both[:, :1])


def test_appending_leaves_the_rest_of_the_cache(run, rng):
    cache = rng.standard_normal((LAYERS, 2, PAGES, KV_HEADS, PAGE * SIZE)).astype(bf16)
    k, v = (rng.standard_normal((3, KV_HEADS, SIZE)).astype(np.float32) for _ in range(2))
    slots = np.array([3, 70, 16], np.int32)
    found = run(KV_APPEND, cache, k, v, slots, 1, shapes="l 2 p g 48, t g 3, t g 3, t")
    expected = cache.copy()
    keys = expected[1, 0].reshape(PAGES, KV_HEADS, SIZE, PAGE)
    values = expected[1, 1].reshape(PAGES, KV_HEADS, PAGE, SIZE)
    for i, slot in enumerate(slots):
        keys[slot // PAGE, :, :, slot % PAGE] = k[i].astype(bf16)
        values[slot // PAGE, :, slot % PAGE] = v[i].astype(bf16)
    np.testing.assert_array_equal(found, expected)
    assert run(KV_APPEND, cache, k[:0], v[:0], slots[:0], 0, shapes="l 2 p 2 48, t 2 3, t 2 3, t").shape == cache.shape


def test_paged_operators_deduce_and_refuse(deduced):
    q, cache = tensor((T, 4, 8), F32), tensor((2, 2, 100, 2, 128), DType.BF16)
    tables, ids, layer = tensor((S, 4), I32), tensor((T,), I32), ScalarType(I64)
    kv = tensor((T, 2, 8), F32)
    assert deduced(PAGED_ATTENTION, q, cache, tables, ids, ids, layer, scale=1.0) == q
    assert deduced(PAGED_ATTENTION, TensorType(None, F32), cache, tables, ids, ids, layer, scale=1.0) == TensorType(None, F32)
    assert deduced(KV_APPEND, cache, kv, kv, ids, layer) == cache
    of_keys = tensor((2, 1, 100, 2, 128), DType.BF16)
    assert deduced(KEY_APPEND, of_keys, kv, ids, layer) == of_keys
    assert deduced(PAGED_ATTENTION, q, of_keys, tables, ids, ids, layer, scale=1.0, value_size=5) == tensor((T, 4, 5), F32)
    refused = [
        ("q has rank 2, expected 3", PAGED_ATTENTION, (tensor((T, 32), F32), cache, tables, ids, ids, layer), {"scale": 1.0}),
        ("page of cache is 64, expected 128", PAGED_ATTENTION, (q, tensor((2, 2, 9, 2, 64), F32), tables, ids, ids, layer), {"scale": 1.0}),
        ("expected a multiple of 3", PAGED_ATTENTION, (q, tensor((2, 2, 9, 3, 128), F32), tables, ids, ids, layer), {"scale": 1.0}),
        (
            "number of kv heads is 0, expected at least 1",
            PAGED_ATTENTION,
            (q, tensor((2, 2, 9, 0, 128), F32), tables, ids, ids, layer),
            {"scale": 1.0},
        ),
        ("length of sinks is 2, expected 4", PAGED_ATTENTION, (q, cache, tables, ids, ids, layer, tensor((2,), F32)), {"scale": 1.0}),
        ("positions holds f32", PAGED_ATTENTION, (q, cache, tables, ids, tensor((T,), F32), layer), {"scale": 1.0}),
        (
            "attribute window is 3, expected 0",
            PAGED_ATTENTION,
            (q, cache, tables, ids, tensor((T, 2), I32), layer),
            {"scale": 1.0, "window": 3},
        ),
        ("columns of positions is 3", PAGED_ATTENTION, (q, cache, tables, ids, tensor((T, 3), I32), layer), {"scale": 1.0}),
        ("attribute window is -1", PAGED_ATTENTION, (q, cache, tables, ids, ids, layer), {"scale": 1.0, "window": -1}),
        ("layer is scalar", PAGED_ATTENTION, (q, cache, tables, ids, ids, ScalarType(F32)), {"scale": 1.0}),
        ("dimension 1 of cache is 2, expected 1", PAGED_ATTENTION, (q, cache, tables, ids, ids, layer), {"scale": 1.0, "value_size": 5}),
        ("dimension 1 of cache is 1, expected 2", PAGED_ATTENTION, (q, of_keys, tables, ids, ids, layer), {"scale": 1.0}),
        ("value_size is 9, expected at most 8", PAGED_ATTENTION, (q, of_keys, tables, ids, ids, layer), {"scale": 1.0, "value_size": 9}),
        ("dimension 1 of cache is 2, expected 1", KEY_APPEND, (cache, kv, ids, layer), {}),
        ("dimension 2 of v is 4, expected 8", KV_APPEND, (cache, kv, tensor((T, 2, 4), F32), ids, layer), {}),
        ("kv heads of cache is 2, expected 3", KV_APPEND, (cache, tensor((T, 3, 8), F32), tensor((T, 3, 8), F32), ids, layer), {}),
    ]
    for message, op, types, attrs in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(op, *types, **attrs)


# --- attention over dense keys and values ------------------------------------------------------------------------------


@pytest.mark.covering("attrs", "kind", "shapes")
@pytest.mark.parametrize("attrs", [{}, {"causal": True}, {"causal": True, "window": 2}, {"window": 3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("kind", [None, "bool", "added"])
@pytest.mark.parametrize("shapes", [None, "b 4 t 3, b 2 s 3, b 2 s 5", "b h t d, c g s d, c g s e"])
def test_dense_attention(run, rng, attrs, kind, shapes):
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 4, 3, 3), (2, 2, 6, 3), (2, 2, 6, 5)))
    mask = {"bool": rng.random((2, 1, 1, 6)) < 0.7, "added": rng.standard_normal((3, 6)).astype(np.float32), None: None}[kind]
    extra = () if mask is None else (mask,)
    found = run(ATTENTION, q, k, v, *extra, scale=0.6, shapes=shapes, **attrs)
    whole = None if mask is None else np.broadcast_to(mask, (2, 4, 3, 6))
    for b, h, i in np.ndindex(2, 4, 3):
        place = i + 3
        seen = np.ones(6, np.bool_)
        if attrs.get("causal"):
            seen &= np.arange(6) <= place
        if "window" in attrs:
            seen &= np.arange(6) > place - attrs["window"]
        if kind == "bool":
            seen &= whole[b, h, i]
        score = k[b, h // 2] @ q[b, h, i] * 0.6
        if "softcap" in attrs:
            score = attrs["softcap"] * np.tanh(score / attrs["softcap"])
        if kind == "added":
            score = score + whole[b, h, i]
        e = np.where(seen, np.exp(score), 0)
        expected = e @ v[b, h // 2] / e.sum() if e.any() else np.zeros(5)
        np.testing.assert_allclose(found[b, h, i], expected, rtol=2e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros(run):
    x = np.ones((1, 1, 2, 4), np.float32)
    np.testing.assert_array_equal(run(ATTENTION, x, x, x, np.zeros((1, 1, 1, 2), np.bool_), scale=1.0), 0 * x)
    np.testing.assert_array_equal(run(ATTENTION, x, x[:, :, :0], x[:, :, :0], scale=1.0, shapes="b h t d, b h s d, b h s d"), 0 * x)


def test_dense_attention_deduces_and_refuses(deduced):
    q, k = tensor((T, 4, S, 8), F32), tensor((T, 2, 6, 8), F32)
    assert deduced(ATTENTION, q, k, tensor((T, 2, 6, 5), F32), scale=1.0) == tensor((T, 4, S, 5), F32)
    assert deduced(ATTENTION, TensorType(None, F32), k, k, scale=1.0) == TensorType(None, F32, 4)
    refused = [
        ("size of k is 7, expected 8", (q, tensor((T, 2, 6, 7), F32), k), {}),
        ("dimension 2 of v is 5, expected 6", (q, k, tensor((T, 2, 5, 8), F32)), {}),
        ("expected a multiple of 3", (q, tensor((T, 3, 6, 8), F32), tensor((T, 3, 6, 8), F32)), {}),
        ("mask holds i32", (q, k, k, tensor((6,), I32)), {}),
        ("extent 5 does not broadcast to 6", (q, k, k, tensor((5,), F32)), {}),
        ("mask has rank 5", (q, k, k, tensor((1, 1, 1, 1, 6), F32)), {}),
        ("softcap is -1", (q, k, k), {"softcap": -1}),
    ]
    for message, types, attrs in refused:
        with pytest.raises(AnnotationError, match=message):
            deduced(ATTENTION, *types, scale=1.0, **attrs)
