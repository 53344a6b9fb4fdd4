"""The layers of encoders of audio, as in Whisper: the log-mel spectrogram, two convolutions, and layers of attention and an MLP. In
Qwen3-Omni, `audio_pieces.py` replaces the two convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.audio import Listening
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.frontend.weights import Derived, Tensor, TensorInfo, WeightSource
from compiler.ir.dims import Dim, DimLike
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ops.elementwise import GELU, LOG, MAXIMUM, MULTIPLY, SUBTRACT
from compiler.ops.manipulate import CONCAT, PERMUTE_DIMS
from compiler.ops.products.matmul import LINEAR
from runtime.spectrogram import BINS, HOP, LEAST, RANGE, ROWS, WINDOW, fourier_table, mel_filters

FOURIER, FILTERS = "hearing.fourier", "hearing.filters"  # names of the tables of the spectrogram, which no checkpoint has
POSITIONS = "hearing.positions"
LONGEST = 10_000.0  # base of the wave lengths in a table of positions that has sines and cosines
LOG_10 = float(np.log(10.0))
NORM_EPS = 1e-5
Attend = Callable[[Var, Var, Var], Var]  # computes attention, from the queries, keys and values of all frames

# --- spectrogram -------------------------------------------------------------------------------------------------------


def log_mel(net: Net, num_mels: int, num_hops: DimLike, samples: Var, loudest: Var, sounding: Var) -> Var:
    """Return the log-mel spectrogram, [hops, mels], scaled as Whisper does, and 0 in hops where `sounding` is 0. The inputs are those of
    the program `hear` (`hearing.py`)."""
    num_hops = Dim.of(num_hops)
    hops = net.reshape(samples, num_hops + (ROWS - 1), HOP)
    windows = net.call(CONCAT, *(net.slice(hops, 0, row, num_hops + row) for row in range(ROWS)), axis=1)
    parts = net.call(LINEAR, windows, net.weight(FOURIER, 2 * BINS, ROWS * HOP))
    real, imaginary = net.slice(parts, 1, 0, BINS), net.slice(parts, 1, BINS, 2 * BINS)
    power = net.add(net.call(MULTIPLY, real, real), net.call(MULTIPLY, imaginary, imaginary))
    energies = net.call(LINEAR, power, net.weight(FILTERS, num_mels, BINS))
    floor = net.call(SUBTRACT, _log_10(net, loudest), ScalarValue(RANGE, "f32"))
    scaled = net.scale(net.add(net.call(MAXIMUM, _log_10(net, energies), floor), ScalarValue(4.0, "f32")), 0.25)
    return net.call(MULTIPLY, scaled, sounding)


def _log_10(net: Net, energies: Var) -> Var:
    return net.scale(net.call(LOG, net.call(MAXIMUM, energies, ScalarValue(LEAST, "f32"))), 1 / LOG_10)


def tables(num_mels: int, listening: Listening | None = None) -> Mapping[str, NDArray[np.float32]]:
    """Return the tables of the spectrogram by name, and the table of positions if it has sines and cosines. Rows of the Fourier table end
    in zeros, because samples are read in whole hops, beyond the end of a window."""
    fourier = np.pad(fourier_table(), ((0, 0), (0, ROWS * HOP - WINDOW)))
    found = {FOURIER: fourier.astype(np.float32), FILTERS: mel_filters(num_mels).astype(np.float32)}
    if listening is not None and listening.sinusoids:
        found[POSITIONS] = sinusoids(listening.num_positions, listening.hidden_size).astype(np.float32)
    return found


def sinusoids(num_positions: int, size: int) -> NDArray[np.float64]:
    """Return the vectors of positions, [positions, size]. The first half of a vector has sines, and the second half cosines; in each half,
    wave lengths grow from one element to the next."""
    turns = np.arange(num_positions)[:, None] * LONGEST ** -np.linspace(0, 1, size // 2)
    return np.concatenate([np.sin(turns), np.cos(turns)], axis=1)


class WithTables(Derived):
    """The weights of a model with an encoder of audio together with the tables that no checkpoint has."""

    def __init__(self, source: WeightSource, given: Mapping[str, NDArray[np.float32]]) -> None:
        self._tables = given
        own = {name: TensorInfo(table.shape, table.dtype, table.nbytes) for name, table in given.items()}
        super().__init__(source, {**source.tensors, **own})

    def read(self, name: str) -> Tensor:
        return self._tables[name] if name in self._tables else self.source.read(name)

    def release(self, name: str) -> None:
        if name not in self._tables:
            self.source.release(name)


# --- encoder -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AudioLayers:
    """An encoder of audio under construction. `prefix` begins the names of its weights."""

    net: Net
    prefix: str
    size: int  # elements of a frame's vector
    heads: int
    intermediate_size: int
    format: WeightFormat | None = None  # None: the format of `net`
    positions: str = ""  # name of the table of positions; empty: its name in the checkpoint

    def embedded(self, x: Var, num_mels: int, frames: DimLike, num_positions: int, heard: Var | None = None) -> Var:
        """Return the vectors of frames, [frames, size]. A frame is computed from two hops and their neighbours. `x[hops, mels]` has two
        hops per frame, and one additional hop if there are fewer than `num_positions` frames, the maximum. The second convolution reads the
        results of the first, one per hop, multiplied by `heard[hops, 1]`, which is 1 or 0; None: it reads them as they are."""
        frames = Dim.of(frames)
        is_whole = frames == Dim.of(num_positions)
        x = self.net.call(GELU, self._convolution(x, "conv1", num_mels, 2 * frames, 1, has_next=not is_whole))
        x = x if heard is None else self.net.call(MULTIPLY, x, self.net.slice(heard, 0, 0, 2 * frames))
        x = self.net.call(GELU, self._convolution(x, "conv2", self.size, 2 * frames, 2))
        positions = self.net.as_f32(self.net.weight(self.positions or f"{self.prefix}embed_positions.weight", num_positions, self.size))
        return self.net.add(x, positions if is_whole else self.net.slice(positions, 0, 0, frames))

    def _convolution(self, x: Var, name: str, in_size: int, length: Dim, stride: int, *, has_next: bool = False) -> Var:
        """Convolve `x[length, in_size]` with three taps: a result is computed from a row and its two neighbours. With a stride of 2, only
        every other row, beginning with the first, has a result. If `has_next` is true, `x` has `length` + 1 rows, and the last one has no
        result. Zeros take the place of neighbours outside `x`."""
        net = self.net
        w = net.call(PERMUTE_DIMS, net.as_f32(net.weight(f"{self.prefix}{name}.weight", self.size, in_size, 3)), axes=(0, 2, 1))
        edge = Constant(np.zeros((1, in_size), np.float32))
        before = net.call(CONCAT, edge, net.slice(x, 0, 0, length - 1), axis=0)
        if stride == 1:
            after = net.slice(x, 0, 1, length + 1) if has_next else net.call(CONCAT, net.slice(x, 0, 1, length), edge, axis=0)
            rows = net.call(CONCAT, before, net.slice(x, 0, 0, length) if has_next else x, after, axis=1)
        else:
            firsts = net.slice(before, 0, 0, length, stride=2)
            rows = net.call(CONCAT, firsts, net.reshape(x, length // 2, 2 * in_size), axis=1)
        bias = net.vector(f"{self.prefix}{name}.bias", self.size)
        return net.product(rows, net.reshape(w, self.size, 3 * in_size), bias, format=self.format)

    def layer(self, x: Var, number: int, frames: DimLike, attend: Attend) -> Var:
        net, size, prefix = self.net, self.size, f"{self.prefix}layers.{number}."
        h = net.layer_norm(x, f"{prefix}self_attn_layer_norm", size, NORM_EPS)
        q, k, v = project(net, h, f"{prefix}self_attn.", ("q_proj", "k_proj", "v_proj"), size, self.heads, frames, self.format)
        mixed = net.reshape(attend(q, k, v), frames, size)
        x = net.add(x, net.linear(mixed, f"{prefix}self_attn.out_proj", size, size, bias=True, format=self.format))
        h = net.layer_norm(x, f"{prefix}final_layer_norm", size, NORM_EPS)
        wide = net.call(GELU, net.linear(h, f"{prefix}fc1", size, self.intermediate_size, bias=True, format=self.format))
        return net.add(x, net.linear(wide, f"{prefix}fc2", self.intermediate_size, size, bias=True, format=self.format))

    def normalised(self, x: Var) -> Var:
        return self.net.layer_norm(x, f"{self.prefix}layer_norm", self.size, NORM_EPS)


def project(
    net: Net, h: Var, prefix: str, names: tuple[str, ...], size: int, heads: int, rows: DimLike, format: WeightFormat | None = None
) -> tuple[Var, ...]:
    """Return the projections of `h[rows, size]` to heads by the layers `names`, [rows, heads, head size] each. All layers have a bias
    except `k_proj`."""
    w = net.stacked([net.weight(f"{prefix}{name}.weight", size, size) for name in names])
    biases = [Constant(np.zeros(size, np.float32)) if name == "k_proj" else net.vector(f"{prefix}{name}.bias", size) for name in names]
    bias = biases[0] if len(biases) == 1 else net.call(CONCAT, *biases, axis=0)
    assert isinstance(bias, Var)
    all_heads = net.reshape(net.product(h, w, bias, format=format), rows, len(names) * heads, size // heads)
    return tuple(net.slice(all_heads, 1, part * heads, (part + 1) * heads) for part in range(len(names)))
