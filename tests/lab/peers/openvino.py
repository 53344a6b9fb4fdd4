"""OpenVINO: Llama in OpenVINO's operators, in the patterns that the exporters of model libraries write, with keys and values as the model's
state. The CPU plugin recognises these patterns: it fuses attention, rotary embedding and norms, and does not convert weights of 8 and 4
bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from tests.lab.peer import PEERS, Run, Subject

GROUP = 32  # inputs that share a scale of 4-bit weights
SWAPPED = np.array([0, 2, 1, 3])  # permutation that transposes positions and heads


Array = NDArray[Any]


def open_model(subject: Subject) -> OpenVino:
    ov, ops = import_module("openvino"), import_module("openvino.opset13")
    model = _Network(ov, ops, subject).model()
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": subject.threads, "PERFORMANCE_HINT": "LATENCY"}
    return OpenVino(ov, ov.Core().compile_model(model, "CPU", properties), subject.config)


class OpenVino:
    def __init__(self, ov: Any, compiled: Any, config: ModelConfig) -> None:
        self._ov, self._config = ov, config
        self._request = compiled.create_infer_request()

    def step(self, tokens: int, sequences: int, context: int) -> Run:
        c, new = self._config, tokens // sequences
        ids = (np.arange(tokens) % c.vocab_size).reshape(sequences, new)
        positions = np.tile(np.arange(context - new, context), (sequences, 1))
        inputs = [ids, positions, np.arange(sequences, dtype=np.int32)]
        past = np.zeros((sequences, c.num_kv_heads, context - new, c.head_dim), np.float32)
        self._fill(past)

        def run() -> NDArray[Any]:
            """Run the step. If the sequences have earlier tokens, the new tokens stay in the state, so the next run computes the following
            tokens."""
            if new == context:
                self._request.reset_state()
                return self._request.infer(inputs)[0]
            logits = self._request.infer(inputs)[0]
            positions[...] += new
            return logits

        return run

    def close(self) -> None:
        del self._request

    def _fill(self, past: NDArray[np.float32]) -> None:
        self._request.reset_state()
        if past.size:
            for state in self._request.query_state():
                state.state = self._ov.Tensor(past)


@dataclass(slots=True)
class _Network:
    ov: Any
    ops: Any
    subject: Subject
    sinks: list[Any] = field(default_factory=list[Any])

    def model(self) -> Any:
        ops, c = self.ops, self.subject.config
        ids, positions, beams = ops.parameter([-1, -1], np.int64), ops.parameter([-1, -1], np.int64), ops.parameter([-1], np.int32)
        x = ops.gather(self._floats("model.embed_tokens"), ids, self._number(0))
        turns = self._turns(positions)
        mask = self._mask(positions)
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}."
            x = ops.add(x, self._attend(self._norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.", turns, mask, beams))
            x = ops.add(x, self._feed(self._norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp."))
        last = ops.gather(x, self._number(-1), self._number(1))
        logits = ops.result(self._linear(self._norm(last, "model.norm"), "lm_head"))
        return self.ov.Model([logits], self.sinks, [ids, positions, beams], "llama")

    # --- weights ---

    def _floats(self, name: str) -> Any:
        """Return weights as f16, the format in which models are exported; the plugin converts them to bfloat16 for products."""
        data = self.subject.weights.read(f"{name}.weight")
        return self.ops.convert(self.ops.constant(data.astype(np.float16)), "f32")

    def _product_weights(self, name: str) -> Any:
        held = PEERS["openvino"].formats[self.subject.held]
        if held == "f16":
            return self._floats(name)
        data = self.subject.weights.read(f"{name}.weight").astype(np.float32)
        if held == "i8" or name == "lm_head":
            numbers, scales = _rounded(data, 127)
            return self._scaled(self.ops.constant(numbers), scales)
        numbers, scales = _rounded(data.reshape(len(data), -1, GROUP), 7)
        packed = (numbers[..., 0::2] & 15 | numbers[..., 1::2] << 4).view(np.uint8)
        constant = self.ops.constant(self.ov.Tensor(packed, list(numbers.shape), self.ov.Type.i4), shared_memory=False)
        return self._scaled(constant, scales, data.shape)

    def _scaled(self, constant: Any, scales: Array, shape: tuple[int, ...] | None = None) -> Any:
        scaled = self.ops.multiply(self.ops.convert(constant, "f16"), self.ops.constant(scales))
        if shape is not None:
            scaled = self.ops.reshape(scaled, self.ops.constant(np.array(shape)), False)
        return self.ops.convert(scaled, "f32")

    # --- layers ---

    def _number(self, value: int) -> Any:
        return self.ops.constant(np.array(value, np.int64))

    def _linear(self, x: Any, name: str) -> Any:
        return self.ops.matmul(x, self._product_weights(name), False, True)

    def _norm(self, x: Any, name: str) -> Any:
        ops = self.ops
        square = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2))), ops.constant(np.array([-1])), True)
        size = ops.sqrt(ops.add(square, ops.constant(np.float32(self.subject.config.norm_eps))))
        gamma = self.subject.weights.read(f"{name}.weight").astype(np.float32)
        return ops.multiply(ops.multiply(x, ops.divide(ops.constant(np.float32(1)), size)), ops.constant(gamma))

    def _feed(self, x: Any, prefix: str) -> Any:
        gate = self.ops.swish(self._linear(x, f"{prefix}gate_proj"))
        return self._linear(self.ops.multiply(gate, self._linear(x, f"{prefix}up_proj")), f"{prefix}down_proj")

    def _turns(self, positions: Any) -> tuple[Any, Any]:
        """Return the cosines and sines for the rotation, [sequences, 1, new, head size]."""
        ops, c = self.ops, self.subject.config
        assert c.rope is not None
        frequencies = (c.rope.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)).astype(np.float32)
        wide = ops.convert(ops.unsqueeze(positions, self._number(-1)), "f32")
        angles = ops.multiply(wide, ops.constant(frequencies[None, None, :]))
        angles = ops.unsqueeze(ops.concat([angles, angles], -1), self._number(1))
        return ops.cos(angles), ops.sin(angles)

    def _mask(self, positions: Any) -> Any:
        """Return the causal mask that is added to the scores, [sequences, 1, new, context]. A token attends to positions up to its own."""
        ops = self.ops
        count = ops.add(ops.reduce_max(positions, ops.constant(np.array([0, 1])), False), self._number(1))
        keys = ops.range(self._number(0), count, self._number(1), "i64")
        hidden = ops.greater(ops.unsqueeze(keys, self._number(0)), ops.unsqueeze(positions, self._number(-1)))
        hidden = ops.unsqueeze(hidden, self._number(1))
        return ops.select(hidden, ops.constant(np.float32(-65504)), ops.constant(np.float32(0)))

    def _attend(self, x: Any, prefix: str, turns: tuple[Any, Any], mask: Any, beams: Any) -> Any:
        ops, c = self.ops, self.subject.config
        query = self._turned(self._heads(self._linear(x, f"{prefix}q_proj"), c.num_heads), turns)
        key = self._turned(self._heads(self._linear(x, f"{prefix}k_proj"), c.num_kv_heads), turns)
        value = self._heads(self._linear(x, f"{prefix}v_proj"), c.num_kv_heads)
        keys, values = (self._repeated(self._remembered(new, f"{prefix}{name}", beams)) for name, new in (("key", key), ("value", value)))
        seen = ops.scaled_dot_product_attention(query, keys, values, mask, causal=False)
        flat = ops.reshape(ops.transpose(seen, ops.constant(SWAPPED)), ops.constant(np.array([0, 0, c.num_heads * c.head_dim])), True)
        return self._linear(flat, f"{prefix}o_proj")

    def _heads(self, x: Any, count: int) -> Any:
        ops = self.ops
        parted = ops.reshape(x, ops.constant(np.array([0, 0, count, self.subject.config.head_dim])), True)
        return ops.transpose(parted, ops.constant(SWAPPED))

    def _turned(self, x: Any, turns: tuple[Any, Any]) -> Any:
        ops, half = self.ops, self.subject.config.head_dim // 2
        low, high = (
            ops.slice(x, *(ops.constant(np.array([n])) for n in (begin, end, 1, 3))) for begin, end in ((0, half), (half, 2 * half))
        )
        across = ops.concat([ops.multiply(high, ops.constant(np.float32(-1))), low], -1)
        return ops.add(ops.multiply(x, turns[0]), ops.multiply(across, turns[1]))

    def _remembered(self, new: Any, name: str, beams: Any) -> Any:
        """Append new keys or values to the state. Return all keys or values so far, [sequences, kv heads, context, head size]."""
        ops, c = self.ops, self.subject.config
        shape = ops.concat([ops.shape_of(beams, "i64"), ops.constant(np.array([c.num_kv_heads, 0, c.head_dim]))], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), shape)
        past = ops.gather(
            ops.read_value(empty, name, self.ov.Type.f32, self.ov.PartialShape([-1, c.num_kv_heads, -1, c.head_dim])),
            beams,
            self._number(0),
        )
        now = ops.concat([past, new], 2)
        self.sinks.append(ops.assign(now, name))
        return now

    def _repeated(self, x: Any) -> Any:
        """Repeat each key or value head once per query head that shares it."""
        ops, c = self.ops, self.subject.config
        group = c.num_heads // c.num_kv_heads
        if group == 1:
            return x
        spread = ops.broadcast(
            ops.unsqueeze(x, self._number(2)), ops.constant(np.array([1, 1, group, 1, 1])), broadcast_spec="BIDIRECTIONAL"
        )
        return ops.reshape(spread, ops.constant(np.array([0, c.num_heads, -1, c.head_dim])), True)


def _rounded(data: Array, most: int) -> tuple[Array, Array]:
    """Quantise to integers, with one scale for each vector along the last axis."""
    scales = (np.abs(data).max(axis=-1, keepdims=True) / most).astype(np.float16)
    return np.clip(np.rint(data / np.maximum(scales.astype(np.float32), 1e-30)), -most, most).astype(np.int8), scales
