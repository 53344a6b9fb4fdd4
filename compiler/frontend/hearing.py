"""The program `hear` of a speech model, which turns a window of audio samples into the keys and values that the decoder reads.

    hear(samples[n], loudest[1, 1], sounding[hops, 1], slots[frames], cache...) -> encoded[frames, size]

A window has the number of hops with which the model was trained. The samples also cover a little audio before and after the window
(`runtime/spectrogram.py`). The program computes the log-mel spectrogram (a short-time Fourier transform as a product with a table), two
convolutions, the layers of the encoder, and for each layer of the decoder the keys and values of all frames, which it appends to the pages
of the sequence. `loudest` is the largest energy of the whole recording: energies below a fixed fraction of it are raised to this fraction,
so that a quiet window stays quiet beside loud ones. `sounding` is 1 for hops of the recording and 0 after its end, where the spectrogram
is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.frontend.config import Hearing, ModelConfig
from compiler.frontend.layers.audio import AudioLayers, log_mel, project
from compiler.frontend.layers.nn import Net
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, ScalarValue, ShapeValue, Var
from compiler.ir.types import tensor
from compiler.ops.attention.kv_cache import KV_APPEND
from compiler.ops.attention.paged import PAGED_ATTENTION
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.manipulate import BROADCAST_TO
from runtime.cache_groups import PAGE_SIZE, HeardGroup
from runtime.spectrogram import AROUND, HOP

ENTRY = "hear"
ENCODER, DECODER = "model.encoder.", "model.decoder."


def add_hearing(net: Net, config: ModelConfig, group: HeardGroup) -> None:
    """Add the program `hear` to the module that `net` builds."""
    hearing = config.hearing
    assert hearing is not None
    i32, f32 = DType.I32, DType.F32
    samples = Var("samples", tensor((HOP * hearing.num_hops + AROUND,), f32))
    loudest = Var("loudest", tensor((1, 1), f32))
    sounding = Var("sounding", tensor((hearing.num_hops, 1), f32))
    slots = Var("slots", tensor((hearing.num_frames,), i32))
    cache = heard_tensors(group, DimVar("heard_parts", 1))
    with net.function(ENTRY, (samples, loudest, sounding, slots, *cache), pure=False):
        x = _encoded(net, config, hearing, log_mel(net, hearing.num_mels, hearing.num_hops, samples, loudest, sounding))
        _remember(net, config, group, x, slots, cache)
        net.builder.returns(x)


def heard_tensors(group: HeardGroup, parts: DimVar) -> tuple[Var, ...]:
    """Return the inputs for the cached keys and values of audio, and for their scales if they have 8 bits. The inputs have room for `parts`
    parts, of which several form a page of the group."""
    return tuple(
        Var(name, tensor(shape, DType(dtype)))
        for name, (shape, dtype) in zip(("heard", "heard_scales"), group.arrays_of(parts), strict=False)
    )


# --- encoder -----------------------------------------------------------------------------------------------------------


def _encoded(net: Net, config: ModelConfig, hearing: Hearing, x: Var) -> Var:
    """Return the encoder's result for each frame, [frames, size], from the spectrogram `x`."""
    frames = hearing.num_frames
    layers = AudioLayers(net, ENCODER, config.hidden_size, hearing.num_heads, hearing.intermediate_size)
    x = layers.embedded(x, hearing.num_mels, frames, frames)
    one = Constant(np.zeros(frames, np.int32)), Constant(np.array([0, frames], np.int32))  # each frame attends to all frames
    pages = _Pages.of(net, config, hearing) if net.format.coarse_rows else None
    scale = (config.hidden_size // hearing.num_heads) ** -0.5

    def attend(q: Var, k: Var, v: Var) -> Var:
        return net.call(RAGGED_ATTENTION, q, k, v, *one, scale=scale) if pages is None else pages.attend(net, q, k, v, scale)

    for number in range(hearing.num_layers):
        x = layers.layer(x, number, frames, attend)
    return layers.normalised(x)


@dataclass(slots=True)
class _Pages:
    """Pages of 8 bits for the keys and values of one layer of the encoder. They exist if products round their rows to 8 bits, so that
    attention multiplies integers, too. The layers write to the same pages, one after another."""

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
        """Write the keys and values of all frames to the pages, and return the attention of each frame to all frames."""
        frames, first = self.num_frames, ScalarValue(Dim.of(0))
        written = net.call(KV_APPEND, self.cache, k, v, Constant(np.arange(frames, dtype=np.int32)), first, self.scales)
        self.cache, self.scales = net.field(written, 0), net.field(written, 1)
        table = Constant(np.arange(-(-frames // PAGE_SIZE), dtype=np.int32)[None])
        own, last = Constant(np.zeros(frames, np.int32)), Constant(np.full(frames, frames - 1, np.int32))
        return net.call(PAGED_ATTENTION, q, self.cache, table, own, last, first, self.scales, scale=scale, row_bits=8)


def _remember(net: Net, config: ModelConfig, group: HeardGroup, x: Var, slots: Var, cache: tuple[Var, ...]) -> None:
    """Append the keys and values of the frames `x` to the cache, at `slots`, for each layer of the decoder."""
    (held, *scales), frames = cache, group.num_frames
    for index, number in enumerate(group.layers):
        prefix = f"{DECODER}layers.{number}.encoder_attn."
        k, v = project(net, x, prefix, ("k_proj", "v_proj"), config.hidden_size, group.num_kv_heads, frames)
        held = net.call(KV_APPEND, held, k, v, slots, ScalarValue(Dim.of(index)), *scales)
        if scales:
            held, scales = net.field(held, 0), [net.field(held, 1)]
