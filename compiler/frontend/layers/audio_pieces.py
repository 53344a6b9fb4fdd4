"""The first layers of Qwen3-Omni's encoder of audio: three convolutions over hops and mels. Each convolution halves the numbers of hops and
of mels, and reads each piece of a recording separately."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.frontend.audio import Listening
from compiler.frontend.layers.audio import POSITIONS, AudioLayers
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, ShapeValue, Var
from compiler.ops.elementwise import GELU
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, PERMUTE_DIMS

NAMES = ("conv2d1", "conv2d2", "conv2d3")
TAPS = 3  # an element of a result is computed from TAPS hops of TAPS mels


@dataclass(frozen=True, slots=True)
class Pieces:
    """`count` pieces of a recording, with the layers and the configuration of the encoder that reads them."""

    layers: AudioLayers
    listening: Listening
    count: Dim

    def embedded(self, spectrogram: Var) -> Var:
        """Return the vectors of frames, [frames, size], from the log-mel spectrogram [hops, mels]. A piece has a frame for each row of the
        table of positions."""
        net, listening, layers = self.layers.net, self.listening, self.layers
        times, mels, channels = listening.piece_hops, listening.num_mels, 1
        x = net.reshape(spectrogram, self.count, times, mels, channels)
        for name in NAMES:
            x = self._convolved(x, name, times, mels, channels)
            times, mels, channels = -(-times // 2), -(-mels // 2), listening.channels
        # Checkpoints order the inputs of the matrix by channel, then by mel; rows of `x` are ordered by mel, then by channel.
        w = net.weight(f"{layers.prefix}conv_out.weight", layers.size, channels * mels)
        w = net.call(PERMUTE_DIMS, net.reshape(net.as_f32(w), layers.size, channels, mels), axes=(0, 2, 1))
        rows = net.reshape(x, self.count * times, mels * channels)
        projected = net.product(rows, net.reshape(w, layers.size, mels * channels), format=layers.format)
        positions = net.reshape(net.as_f32(net.weight(POSITIONS, times, layers.size)), 1, times, layers.size)
        return net.reshape(net.add(net.reshape(projected, self.count, times, layers.size), positions), self.count * times, layers.size)

    def _convolved(self, x: Var, name: str, times: int, mels: int, channels: int) -> Var:
        """Convolve `x[pieces, times, mels, channels]` with a stride of 2 in both directions. Zeros surround each piece."""
        net, layers, out = self.layers.net, self.layers, self.listening.channels
        x = self._surrounded(x, 1, (times, mels, channels))
        x = self._surrounded(x, 2, (times + 2, mels, channels))
        new_times, new_mels = -(-times // 2), -(-mels // 2)
        taps = [
            net.slice(net.slice(x, 1, hop, hop + 2 * new_times - 1, stride=2), 2, mel, mel + 2 * new_mels - 1, stride=2)
            for hop in range(TAPS)
            for mel in range(TAPS)
        ]
        rows = net.reshape(net.call(CONCAT, *taps, axis=3), self.count * (new_times * new_mels), TAPS**2 * channels)
        w = net.as_f32(net.weight(f"{layers.prefix}{name}.weight", out, channels, TAPS, TAPS))  # [out, channels, mels, hops]
        w = net.reshape(net.call(PERMUTE_DIMS, w, axes=(0, 3, 2, 1)), out, TAPS**2 * channels)
        found = net.call(GELU, net.product(rows, w, net.vector(f"{layers.prefix}{name}.bias", out), format=layers.format))
        return net.reshape(found, self.count, new_times, new_mels, out)

    def _surrounded(self, x: Var, axis: int, shape: tuple[int, ...]) -> Var:
        edge = [self.count, *map(Dim.of, shape)]
        edge[axis] = Dim.of(1)
        zeros = self.layers.net.call(BROADCAST_TO, Constant(np.zeros((1, 1, 1, 1), np.float32)), ShapeValue(tuple(edge)))
        return self.layers.net.call(CONCAT, zeros, x, zeros, axis=axis)
