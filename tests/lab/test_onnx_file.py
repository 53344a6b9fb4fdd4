"""ONNX files that the benchmark writes for transformers.js: their fields, and their logits if ONNX Runtime is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.bench.gguf_file import q4_0
from deploy.bench.synthetic import RandomWeights, llama_config, shapes_of
from tests.lab.onnx_file import BLOCK, write_onnx

CONFIG = llama_config(64, 2, 4, 2, 16, 96, 50)
WEIGHTS = RandomWeights(shapes_of(CONFIG))
Array = NDArray[Any]


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Parse the fields of a protocol buffer message: varints, four-byte values, and length-prefixed bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        length = {2: varint, 5: lambda: 4}[kind]()
        yield number, message[position : position + length]
        position += length


def texts(message: bytes, wanted: int) -> list[str]:
    return [value.decode() for number, value in fields(message) if number == wanted and isinstance(value, bytes)]


def test_every_operand_is_defined_before_its_use(tmp_path: Path) -> None:
    write_onnx(tmp_path, CONFIG, WEIGHTS)
    model = list(fields((tmp_path / "onnx" / "model_q4.onnx").read_bytes()))
    (graph,) = (value for number, value in model if number == 7 and isinstance(value, bytes))
    parts = [(number, value) for number, value in fields(graph) if isinstance(value, bytes)]
    defined = {"", *(texts(value, 8)[0] for number, value in parts if number == 5), *(texts(v, 1)[0] for n, v in parts if n == 11)}
    products = 0
    for number, node in parts:
        if number == 1:
            assert set(texts(node, 1)) <= defined
            defined |= set(texts(node, 2))
            products += texts(node, 4) == ["MatMulNBits"]
    outputs = {texts(value, 1)[0] for number, value in parts if number == 12}
    assert outputs <= defined
    assert outputs == {"logits", *(f"present.{layer}.{part}" for layer in range(2) for part in ("key", "value"))}
    assert products == 2 * 7 + 1


def dequantised(name: str) -> Array:
    weights = WEIGHTS.read(f"{name}.weight").astype(np.float32)
    scales, quants = q4_0(weights.reshape(-1, BLOCK))
    return (scales.astype(np.float32) * (quants.astype(np.float32) - 8)).reshape(weights.shape)


def logits(ids: list[int]) -> Array:
    """Compute the logits of a token sequence in NumPy, without optimisations, as a reference."""
    c = CONFIG

    def norm(x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps)  # without gains, because those of random models are 1

    def heads(x: Array, name: str) -> Array:
        return (x @ dequantised(name).T).reshape(len(ids), -1, c.head_dim)

    def rotated(x: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    assert c.rope is not None
    angles = np.arange(len(ids))[:, None, None] * c.rope.theta ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = np.cos(angles), np.sin(angles)
    x = WEIGHTS.read("model.embed_tokens.weight")[ids].astype(np.float16).astype(np.float32)
    for layer in range(c.num_layers):
        stem, normed = f"model.layers.{layer}", norm(x)
        q, k = (rotated(heads(normed, f"{stem}.self_attn.{part}_proj")) for part in "qk")
        v = heads(normed, f"{stem}.self_attn.v_proj")
        k, v = (np.repeat(part, c.num_heads // c.num_kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) * c.attention_scale + np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + attended @ dequantised(f"{stem}.self_attn.o_proj").T
        normed = norm(x)
        gate, up = (normed @ dequantised(f"{stem}.mlp.{part}_proj").T for part in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ dequantised(f"{stem}.mlp.down_proj").T
    return norm(x) @ dequantised("lm_head").T


def test_onnx_runtime_computes_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.lab.onnx_file.ACCURACY", 1)  # compute with 32-bit activations
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is an optional peer")
    write_onnx(tmp_path, CONFIG, WEIGHTS)
    session = runtime.InferenceSession(str(tmp_path / "onnx" / "model_q4.onnx"))
    ids = [7, 3, 41, 8, 22]
    cache = {i.name: np.zeros((1, CONFIG.num_kv_heads, 0, CONFIG.head_dim), np.float32) for i in session.get_inputs() if "past" in i.name}
    found = []
    for part in (ids[:3], ids[3:4], ids[4:]):
        past = next(iter(cache.values())).shape[2]
        mask = np.ones((1, past + len(part)), np.int64)
        result, *present = session.run(None, {"input_ids": np.array([part]), "attention_mask": mask, **cache})
        cache = dict(zip(cache, present, strict=True))
        found.append(result[0])
    np.testing.assert_allclose(np.concatenate(found), logits(ids), atol=1e-4)
