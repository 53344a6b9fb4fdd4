"""Write a model of the Llama family as an ONNX file with 4-bit weights, with the operators that transformers.js expects.

Published checkpoints for transformers.js use the same operators: products are `MatMulNBits` with blocks of 32, attention is
`GroupQueryAttention`, and the embedding has 16 bits. The quantised weights are those of a GGUF file in the format Q4_0. The head has 4 bits
too, because ONNX Runtime has no fast 8-bit product for browsers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.weights import WeightSource
from deploy.bench.gguf_file import q4_0

BLOCK = 32
CODES = {"float32": 1, "uint8": 2, "int32": 6, "int64": 7, "float16": 10}  # element types in a TensorProto
FLOAT, INT = 1, 2  # types of attributes
OPSETS = {"": 17, "com.microsoft": 1}
EXTENSION = "com.microsoft"
ACCURACY = 4  # lets the engine round activations to 8 bits, as its published checkpoints do

Array = NDArray[Any]


def write_onnx(folder: Path, config: ModelConfig, weights: WeightSource) -> None:
    """Write `config.json` and `onnx/model_q4.onnx` into the folder."""
    (folder / "onnx").mkdir(parents=True)
    described = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_size": config.hidden_size,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "onnx" / "model_q4.onnx").write_bytes(_Graph(config, weights).model())


@dataclass
class _Graph:
    """The graph of one step: the tokens of a prompt, or one token after those in the cache."""

    config: ModelConfig
    weights: WeightSource
    nodes: list[bytes] = field(default_factory=list[bytes])
    tensors: list[bytes] = field(default_factory=list[bytes])

    def model(self) -> bytes:
        """Return the bytes of a ModelProto."""
        c = self.config
        batch, new, past, total = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
        inputs = [_value("input_ids", "int64", (batch, new)), _value("attention_mask", "int64", (batch, total))]
        outputs = [_value("logits", "float32", (batch, new, c.vocab_size))]
        self._step()
        for layer in range(c.num_layers):
            for part in ("key", "value"):
                inputs.append(_value(f"past_key_values.{layer}.{part}", "float32", (batch, c.num_kv_heads, past, c.head_dim)))
                outputs.append(_value(f"present.{layer}.{part}", "float32", (batch, c.num_kv_heads, total, c.head_dim)))
        graph = b"".join(_bytes(1, node) for node in self.nodes) + _bytes(2, b"step")
        graph += b"".join(_bytes(5, tensor) for tensor in self.tensors)
        graph += b"".join(_bytes(11, value) for value in inputs) + b"".join(_bytes(12, value) for value in outputs)
        opsets = b"".join(_bytes(8, _bytes(1, domain.encode()) + _number(2, version)) for domain, version in OPSETS.items())
        return _number(1, 8) + opsets + _bytes(7, graph)

    def _step(self) -> None:
        c = self.config
        self._positions()
        self._tensor("embed", self.weights.read("model.embed_tokens.weight").astype(np.float16))
        self._node("Gather", ["embed", "input_ids"], ["embedded_16"])
        self._node("Cast", ["embedded_16"], ["embedded"], to=CODES["float32"])
        self._norm("model.layers.0.input_layernorm", None, "embedded", "residual.0", "normed.0")
        for layer in range(c.num_layers):
            self._layer(layer)
        self._product("lm_head", f"normed.{c.num_layers}", "logits")

    def _positions(self) -> None:
        """Compute the operands of GroupQueryAttention that state lengths, and its table of rotations."""
        c = self.config
        assert c.family == "llama" and c.rope is not None, c
        self._tensor("one", np.array([1], np.int64))
        self._tensor("second", np.array(1, np.int64))
        self._node("ReduceSum", ["attention_mask", "one"], ["lengths"], keepdims=0)
        self._node("Sub", ["lengths", "one"], ["last_positions"])
        self._node("Cast", ["last_positions"], ["last_positions_32"], to=CODES["int32"])
        self._node("Shape", ["attention_mask"], ["mask_shape"])
        self._node("Gather", ["mask_shape", "second"], ["total"])
        self._node("Cast", ["total"], ["total_32"], to=CODES["int32"])
        angles = np.arange(c.max_context)[:, None] * c.rope.theta ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
        self._tensor("cos", np.cos(angles).astype(np.float32))
        self._tensor("sin", np.sin(angles).astype(np.float32))

    def _layer(self, layer: int) -> None:
        c, stem = self.config, f"model.layers.{layer}"
        x = f"normed.{layer}"
        for part in "qkv":
            self._product(f"{stem}.self_attn.{part}_proj", x, f"{part}.{layer}")
        cache = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        self._node(
            "GroupQueryAttention",
            [*(f"{part}.{layer}" for part in "qkv"), *cache, "last_positions_32", "total_32", "cos", "sin"],
            [f"attended.{layer}", f"present.{layer}.key", f"present.{layer}.value"],
            EXTENSION,
            num_heads=c.num_heads,
            kv_num_heads=c.num_kv_heads,
            scale=float(c.attention_scale),
            do_rotary=1,
        )
        self._product(f"{stem}.self_attn.o_proj", f"attended.{layer}", f"o.{layer}")
        self._norm(f"{stem}.post_attention_layernorm", f"residual.{layer}", f"o.{layer}", f"middle.{layer}", f"inner.{layer}")
        for part in ("gate", "up"):
            self._product(f"{stem}.mlp.{part}_proj", f"inner.{layer}", f"{part}.{layer}")
        self._node("Sigmoid", [f"gate.{layer}"], [f"sigmoid.{layer}"])
        self._node("Mul", [f"gate.{layer}", f"sigmoid.{layer}"], [f"silu.{layer}"])
        self._node("Mul", [f"silu.{layer}", f"up.{layer}"], [f"wide.{layer}"])
        self._product(f"{stem}.mlp.down_proj", f"wide.{layer}", f"down.{layer}")
        following = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < c.num_layers else "model.norm"
        self._norm(following, f"middle.{layer}", f"down.{layer}", f"residual.{layer + 1}", f"normed.{layer + 1}")

    def _norm(self, name: str, residual: str | None, x: str, total: str, normed: str) -> None:
        """Add the residual stream to `x` if there is one, and normalise the sum. `total` names the sum."""
        gains = self._tensor(f"{name}.weight", self.weights.read(f"{name}.weight").astype(np.float32))
        epsilon = self.config.norm_eps
        if residual is None:
            self._node("SimplifiedLayerNormalization", [x, gains], [normed], axis=-1, epsilon=epsilon, stash_type=1)
            self._node("Identity", [x], [total])
        else:
            self._node("SkipSimplifiedLayerNormalization", [residual, x, gains], [normed, "", "", total], EXTENSION, epsilon=epsilon)

    def _product(self, name: str, x: str, result: str) -> None:
        weights = self.weights.read(f"{name}.weight")
        rows, columns = weights.shape
        scales, quants = q4_0(weights.astype(np.float32).reshape(-1, BLOCK))
        pairs = quants[:, 0::2] | quants[:, 1::2] << 4
        self._node(
            "MatMulNBits",
            [
                x,
                self._tensor(f"{name}.quants", pairs.reshape(rows, columns // BLOCK, BLOCK // 2)),
                self._tensor(f"{name}.scales", scales.astype(np.float32).reshape(-1)),
            ],
            [result],
            EXTENSION,
            K=columns,
            N=rows,
            bits=4,
            block_size=BLOCK,
            accuracy_level=ACCURACY,
        )

    def _tensor(self, name: str, values: Array) -> str:
        dims = b"".join(_number(1, size) for size in values.shape)
        self.tensors.append(dims + _number(2, CODES[values.dtype.name]) + _bytes(8, name.encode()) + _bytes(9, values.tobytes()))
        return name

    def _node(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: float) -> None:
        fields = b"".join(_bytes(1, name.encode()) for name in inputs) + b"".join(_bytes(2, name.encode()) for name in outputs)
        fields += _bytes(4, kind.encode()) + _bytes(7, domain.encode())
        self.nodes.append(fields + b"".join(_bytes(5, attribute) for attribute in _attributes(attributes)))


def _attributes(values: dict[str, float]) -> Iterator[bytes]:
    for name, value in values.items():
        if isinstance(value, int):
            yield _bytes(1, name.encode()) + _number(3, value) + _number(20, INT)
        else:
            yield _bytes(1, name.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", value) + _number(20, FLOAT)


def _value(name: str, dtype: str, shape: Sequence[int | str]) -> bytes:
    """Return a ValueInfoProto. A dimension is a number or a name."""
    sizes = b"".join(_bytes(1, _number(1, size) if isinstance(size, int) else _bytes(2, size.encode())) for size in shape)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _number(1, CODES[dtype]) + _bytes(2, sizes)))


# --- fields of protocol buffers ------------------------------------------------------------------------------------------


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value % (1 << 64))  # a negative number is written as its two's complement


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
