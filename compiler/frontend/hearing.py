"""The program `hear` of a speech model, which turns a window of audio samples into the keys and values that the decoder reads.

    hear(samples[n], loudest[1, 1], sounding[hops, 1], slots[frames], cache...) -> encoded[frames, size]

A window has a fixed number of hops, as the model was trained, and its samples reach a little beyond it (`runtime/spectrogram.py`). The
program computes the log-mel spectrogram (a short-time Fourier transform as a product with a table), two convolutions, the layers of the
encoder, and for each layer of the decoder the keys and values of all frames, which it appends to the pages of the sequence. `loudest` is
the largest energy of the whole recording: much lower energies are raised to a floor below it, so that quiet windows stay quiet. `sounding`
is 1 for hops of the recording and 0 after its end, where the spectrogram is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import Hearing, ModelConfig
from compiler.frontend.layers.nn import Net
from compiler.frontend.weights import Tensor, TensorInfo, WeightSource
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, ShapeValue, Var
from compiler.ir.types import tensor
from compiler.ops.attention.kv_cache import KV_APPEND
from compiler.ops.attention.paged import PAGED_ATTENTION
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import GELU, LOG, MAXIMUM, MULTIPLY, SUBTRACT
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, PERMUTE_DIMS, SLICE
from compiler.ops.products.matmul import LINEAR
from runtime.cache_groups import PAGE_SIZE, HeardGroup
from runtime.spectrogram import AROUND, BINS, HOP, LEAST, RANGE, ROWS, WINDOW, fourier_table, mel_filters

ENTRY = "hear"
FOURIER, FILTERS = "hearing.fourier", "hearing.filters"  # names of the tables, which no checkpoint has
LOG_10 = float(np.log(10.0))
ENCODER, DECODER = "model.encoder.", "model.decoder."


def add_hearing(net: Net, config: ModelConfig, group: HeardGroup) -> None:
    """Add the program to the module of the builder."""
    hearing = config.hearing
    assert hearing is not None
    i32, f32 = DType.I32, DType.F32
    samples = Var("samples", tensor((HOP * hearing.num_hops + AROUND,), f32))
    loudest = Var("loudest", tensor((1, 1), f32))
    sounding = Var("sounding", tensor((hearing.num_hops, 1), f32))
    slots = Var("slots", tensor((hearing.num_frames,), i32))
    cache = heard_tensors(group, DimVar("heard_parts", 1))
    with net.function(ENTRY, (samples, loudest, sounding, slots, *cache), pure=False):
        x = _encoded(net, config, hearing, _log_mel(net, hearing, samples, loudest, sounding))
        _remember(net, config, group, x, slots, cache)
        net.builder.returns(x)


def heard_tensors(group: HeardGroup, parts: DimVar) -> tuple[Var, ...]:
    """Return the inputs that hold the keys and values of audio, and their scales if they have 8 bits."""
    return tuple(
        Var(name, tensor(shape, DType(dtype)))
        for name, (shape, dtype) in zip(("heard", "heard_scales"), group.arrays_of(parts), strict=False)
    )


# --- spectrogram -------------------------------------------------------------------------------------------------------


def _log_mel(net: Net, hearing: Hearing, samples: Var, loudest: Var, sounding: Var) -> Var:
    """Return the logarithms of the energies, [hops, mels], scaled as Whisper does."""
    num_hops = hearing.num_hops
    hops = net.reshape(samples, num_hops + ROWS - 1, HOP)
    windows = net.call(CONCAT, *(net.slice(hops, 0, row, row + num_hops) for row in range(ROWS)), axis=1)
    parts = net.call(LINEAR, windows, net.weight(FOURIER, 2 * BINS, ROWS * HOP))
    real, imaginary = net.slice(parts, 1, 0, BINS), net.slice(parts, 1, BINS, 2 * BINS)
    power = net.add(net.call(MULTIPLY, real, real), net.call(MULTIPLY, imaginary, imaginary))
    energies = net.call(LINEAR, power, net.weight(FILTERS, hearing.num_mels, BINS))
    floor = net.call(SUBTRACT, _log_10(net, loudest), ScalarValue(RANGE, "f32"))
    scaled = net.scale(net.add(net.call(MAXIMUM, _log_10(net, energies), floor), ScalarValue(4.0, "f32")), 0.25)
    return net.call(MULTIPLY, scaled, sounding)


def _log_10(net: Net, energies: Var) -> Var:
    return net.scale(net.call(LOG, net.call(MAXIMUM, energies, ScalarValue(LEAST, "f32"))), 1 / LOG_10)


def tables(hearing: Hearing) -> Mapping[str, NDArray[np.float32]]:
    """Return the tables of the spectrogram by name. Rows of the Fourier transform end in zeros, because a window is read in whole hops."""
    fourier = np.pad(fourier_table(), ((0, 0), (0, ROWS * HOP - WINDOW)))
    return {FOURIER: fourier.astype(np.float32), FILTERS: mel_filters(hearing.num_mels).astype(np.float32)}


class WithTables:
    """The weights of a speech model together with the tables of its spectrogram."""

    def __init__(self, source: WeightSource, hearing: Hearing) -> None:
        self._source, self._tables = source, tables(hearing)
        own = {name: TensorInfo(table.shape, table.dtype, table.nbytes) for name, table in self._tables.items()}
        self.tensors: Mapping[str, TensorInfo] = {**source.tensors, **own}

    def read(self, name: str) -> Tensor:
        return self._tables[name] if name in self._tables else self._source.read(name)

    def release(self, name: str) -> None:
        if name not in self._tables:
            self._source.release(name)

    def digest(self) -> str:
        return self._source.digest()


# --- encoder -----------------------------------------------------------------------------------------------------------


def _encoded(net: Net, config: ModelConfig, hearing: Hearing, x: Var) -> Var:
    size, frames = config.hidden_size, hearing.num_frames
    x = net.call(GELU, _convolution(net, x, "conv1", hearing.num_mels, size, 2 * frames, 1))
    x = net.call(GELU, _convolution(net, x, "conv2", size, size, 2 * frames, 2))
    x = net.add(x, net.as_f32(net.weight(f"{ENCODER}embed_positions.weight", frames, size)))
    one = Constant(np.zeros(frames, np.int32)), Constant(np.array([0, frames], np.int32))  # the frames are one text
    pages = _Pages.of(net, config, hearing) if net.format.coarse_rows else None
    for number in range(hearing.num_layers):
        x = _layer(net, config, hearing, x, f"{ENCODER}layers.{number}.", one, pages)
    return net.layer_norm(x, f"{ENCODER}layer_norm", size, config.norm_eps)


def _convolution(net: Net, x: Var, name: str, in_size: int, size: int, length: int, stride: int) -> Var:
    """Convolve `x[length, in_size]` with three taps: each row is multiplied with its neighbours. With a stride of 2, two neighbouring rows
    become one."""
    w = net.call(PERMUTE_DIMS, net.as_f32(net.weight(f"{ENCODER}{name}.weight", size, in_size, 3)), axes=(0, 2, 1))
    edge = Constant(np.zeros((1, in_size), np.float32))
    before = net.call(CONCAT, edge, net.slice(x, 0, 0, length - 1), axis=0)
    if stride == 1:
        rows = net.call(CONCAT, before, x, net.call(CONCAT, net.slice(x, 0, 1, length), edge, axis=0), axis=1)
    else:
        firsts = net.call(SLICE, before, axis=0, begin=0, end=length, stride=2)
        rows = net.call(CONCAT, firsts, net.reshape(x, length // 2, 2 * in_size), axis=1)
    return net.product(rows, net.reshape(w, size, 3 * in_size), net.vector(f"{ENCODER}{name}.bias", size))


@dataclass(slots=True)
class _Pages:
    """Pages of 8 bits for the keys and values of one layer of the encoder, where products round their rows to 8 bits: attention then
    multiplies integers, too. The layers write to the same pages, one after another."""

    cache: Var  # [1, 2, pages, heads, PAGE_SIZE * size]
    scales: Var  # [1, 2, pages, heads, PAGE_SIZE]
    num_frames: int

    @staticmethod
    def of(net: Net, config: ModelConfig, hearing: Hearing) -> _Pages:
        heads, count = hearing.num_heads, -(-hearing.num_frames // PAGE_SIZE)

        def zeros(dtype: DType, *shape: int) -> Var:
            return net.call(BROADCAST_TO, Constant(np.zeros([1] * len(shape), dtype.numpy)), ShapeValue(tuple(map(Dim.of, shape))))

        size = config.hidden_size // heads
        return _Pages(
            zeros(DType.I8, 1, 2, count, heads, PAGE_SIZE * size), zeros(DType.F32, 1, 2, count, heads, PAGE_SIZE), hearing.num_frames
        )

    def attend(self, net: Net, q: Var, k: Var, v: Var, scale: float) -> Var:
        frames, first = self.num_frames, ScalarValue(Dim.of(0))
        written = net.call(KV_APPEND, self.cache, k, v, Constant(np.arange(frames, dtype=np.int32)), first, self.scales)
        self.cache, self.scales = net.field(written, 0), net.field(written, 1)
        table = Constant(np.arange(-(-frames // PAGE_SIZE), dtype=np.int32)[None])
        own, last = Constant(np.zeros(frames, np.int32)), Constant(np.full(frames, frames - 1, np.int32))
        return net.call(PAGED_ATTENTION, q, self.cache, table, own, last, first, self.scales, scale=scale, row_bits=8)


def _layer(net: Net, config: ModelConfig, hearing: Hearing, x: Var, prefix: str, one: tuple[Atom, Atom], pages: _Pages | None) -> Var:
    size, eps = config.hidden_size, config.norm_eps
    h = net.layer_norm(x, f"{prefix}self_attn_layer_norm", size, eps)
    q, k, v = project(net, h, f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj"), size, hearing.num_heads, hearing.num_frames)
    scale = (size // hearing.num_heads) ** -0.5
    mixed = net.call(RAGGED_ATTENTION, q, k, v, *one, scale=scale) if pages is None else pages.attend(net, q, k, v, scale)
    mixed = net.reshape(mixed, hearing.num_frames, size)
    x = net.add(x, net.linear(mixed, f"{prefix}self_attn.out_proj", size, size, bias=True))
    h = net.layer_norm(x, f"{prefix}final_layer_norm", size, eps)
    wide = net.call(GELU, net.linear(h, f"{prefix}fc1", size, hearing.intermediate_size, bias=True))
    return net.add(x, net.linear(wide, f"{prefix}fc2", hearing.intermediate_size, size, bias=True))


def project(net: Net, h: Var, prefix: str, names: tuple[str, ...], size: int, heads: int, rows: Dim | int) -> tuple[Var, ...]:
    """Return the projections of `h[rows, size]` to heads, [rows, heads, head size] each. Keys have no bias."""
    w = net.stacked([net.weight(f"{prefix}{name}.weight", size, size) for name in names])
    biases = [Constant(np.zeros(size, np.float32)) if name == "k_proj" else net.vector(f"{prefix}{name}.bias", size) for name in names]
    bias = biases[0] if len(biases) == 1 else net.call(CONCAT, *biases, axis=0)
    assert isinstance(bias, Var)
    all_heads = net.reshape(net.product(h, w, bias), rows, len(names) * heads, size // heads)
    return tuple(net.slice(all_heads, 1, part * heads, (part + 1) * heads) for part in range(len(names)))


def _remember(net: Net, config: ModelConfig, group: HeardGroup, x: Var, slots: Var, cache: tuple[Var, ...]) -> None:
    """Append the keys and values of all frames for each layer of the decoder."""
    (held, *scales), frames = cache, group.num_frames
    for index, number in enumerate(group.layers):
        prefix = f"{DECODER}layers.{number}.encoder_attn."
        k, v = project(net, x, prefix, ("k_proj", "v_proj"), config.hidden_size, group.num_kv_heads, frames)
        held = net.call(KV_APPEND, held, k, v, slots, ScalarValue(Dim.of(index)), *scales)
        if scales:
            held, scales = net.field(held, 0), [net.field(held, 1)]
