"""A stand-in for PyTorch in tests: NumPy under the names that the peer calls, so that the peer's logits can be compared with ours. It
logs the calls that matter to the file $STAND_IN_LOG, a line each. Its times mean nothing."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

bfloat16 = "bfloat16"


def log(*words):
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        print(*words, file=file)


class Tensor(np.ndarray):
    def view(self, kind):
        if kind == bfloat16:
            return (np.asarray(self).astype(np.int32) << 16).view(np.float32).view(Tensor)
        return super().view(kind)

    def to(self, device):
        return self

    def transpose(self, one, other):
        return np.swapaxes(self, one, other)

    def chunk(self, count, axis):
        return np.split(self, count, axis)

    def same(self):
        return self

    bfloat16 = float = cpu = same

    def cos(self):
        return np.cos(self)

    def sin(self):
        return np.sin(self)

    def numpy(self):
        return np.asarray(self)


def from_numpy(array):
    return array.view(Tensor)


def zeros(shape, dtype, device):
    log("zeros", *shape, dtype, device)
    return np.zeros(shape, np.float32).view(Tensor)


def arange(*bounds, device):
    return np.arange(*bounds).view(Tensor)


def cat(tensors, axis=0):
    return np.concatenate(tensors, axis).view(Tensor)


def _silu(x):
    return x / (1 + np.exp(-x))


def _rms_norm(x, shape, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(query, key, value, is_causal=False, enable_gqa=False):
    if enable_gqa:
        key, value = (np.repeat(t, query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
    if is_causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value).view(Tensor)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        log("record")

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0  # milliseconds


def compile(function, mode, dynamic):
    log("compile", function.__name__, mode, dynamic)
    return function


nn = SimpleNamespace(
    functional=SimpleNamespace(
        linear=lambda x, weight: x @ weight.T, rms_norm=_rms_norm, silu=_silu, scaled_dot_product_attention=_attention
    )
)
cuda = SimpleNamespace(is_available=lambda: os.environ.get("STAND_IN_GPU", "1") == "1", Event=Event)
inference_mode = nullcontext
_dynamo = SimpleNamespace(mark_static_address=lambda tensor: log("static", *tensor.shape))
