"""Llama's layers with the operators of PyTorch that a model library would call, in bfloat16. The tensors of keys and values are
preallocated, so a step copies no earlier keys and values.

The peer on the CPU and the peer on a GPU use this module. The latter runs in another interpreter, so this module imports nothing of
relaxserve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Rope(Protocol):
    @property
    def theta(self) -> float: ...


class Config(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def rope(self) -> Rope | None: ...


def tensor_of(torch: Any, array: NDArray[Any], device: str) -> Any:
    """Convert an array of bfloat16, or of its bits, to torch. The bits are passed as integers, because torch does not know NumPy's
    bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy()).view(torch.bfloat16).to(device)


class TorchLlama:
    def __init__(self, torch: Any, config: Config, weights: Mapping[str, Any], device: str, *, is_compiled: bool = False) -> None:
        self._torch, self._config, self._weights, self._device = torch, config, weights, device
        self._functions = torch.nn.functional
        self._is_compiled = is_compiled

    def step(self, tokens: int, sequences: int, context: int) -> Callable[[], Any]:
        """Return a function that runs a step and returns the logits after each sequence's last token, on the device."""
        torch, c, new = self._torch, self._config, tokens // sequences
        shape = (c.num_layers, 2, sequences, c.num_kv_heads, context, c.head_dim)
        past = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        ids = torch.arange(tokens, device=self._device).reshape(sequences, new) % c.vocab_size
        turns = self._turns(context - new, context)
        logits = self._logits
        if self._is_compiled:
            # The mode replays CUDA graphs, which is possible only if tensors that the step changes do not move.
            torch._dynamo.mark_static_address(past)
            logits = torch.compile(self._logits, mode="reduce-overhead", dynamic=False)

        def run() -> Any:
            with torch.inference_mode():
                return logits(ids, turns, past)

        return run

    def _turns(self, begin: int, end: int) -> tuple[Any, Any]:
        assert self._config.rope is not None
        torch, size = self._torch, self._config.head_dim
        frequencies = self._config.rope.theta ** (-torch.arange(0, size, 2, device=self._device) / size)
        angles = torch.arange(begin, end, device=self._device)[:, None] * torch.cat((frequencies, frequencies))
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def _logits(self, ids: Any, turns: tuple[Any, Any], past: Any) -> Any:
        x = self._weights["model.embed_tokens.weight"][ids]
        for layer in range(self._config.num_layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attend(self._norm(x, f"{prefix}input_layernorm"), f"{prefix}self_attn.", turns, past[layer])
            x = x + self._feed(self._norm(x, f"{prefix}post_attention_layernorm"), f"{prefix}mlp.")
        return self._linear(self._norm(x[:, -1], "model.norm"), "lm_head")

    def _linear(self, x: Any, name: str) -> Any:
        return self._functions.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, x: Any, name: str) -> Any:
        return self._functions.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._config.norm_eps)

    def _feed(self, x: Any, prefix: str) -> Any:
        gate, up = self._linear(x, f"{prefix}gate_proj"), self._linear(x, f"{prefix}up_proj")
        return self._linear(self._functions.silu(gate) * up, f"{prefix}down_proj")

    def _attend(self, x: Any, prefix: str, turns: tuple[Any, Any], past: Any) -> Any:
        sequences, new, _ = x.shape
        query, key, value = (self._heads(self._linear(x, f"{prefix}{which}_proj")) for which in "qkv")
        past[0, :, :, -new:], past[1, :, :, -new:] = self._turned(key, turns), value
        query = self._turned(query, turns)
        if new == 1:  # treat query heads that share keys as positions of one head, so that no mask is needed and no keys are repeated
            query = query.reshape(sequences, self._config.num_kv_heads, -1, self._config.head_dim)
            seen = self._functions.scaled_dot_product_attention(query, past[0], past[1])
        else:
            seen = self._functions.scaled_dot_product_attention(query, past[0], past[1], is_causal=True, enable_gqa=True)
        seen = seen.reshape(sequences, self._config.num_heads, new, self._config.head_dim)
        return self._linear(seen.transpose(1, 2).reshape(sequences, new, -1), f"{prefix}o_proj")

    def _heads(self, x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, self._config.head_dim).transpose(1, 2)

    def _turned(self, x: Any, turns: tuple[Any, Any]) -> Any:
        low, high = x.chunk(2, -1)
        return x * turns[0] + self._torch.cat((-high, low), -1) * turns[1]
