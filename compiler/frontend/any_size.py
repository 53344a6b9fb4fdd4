"""The program `see` for crops of any size.

    see(patches[q, m, values], points[q, m, 2], crop_ids[q * m], ends[n], (window_ids[q * m], window_ends[w])?,
        (taps[q * m, 4], shares[q * m, 4])?) -> rows[q, depths * hidden size]

A crop consists of squares of `m` patches, each of which becomes one row. A patch is a row of bytes, and its point is its row and column in
its crop. `ends` says after which patch each crop ends. The program scales and normalises the bytes, multiplies each patch by a matrix, and
applies the layers of the encoder, which rotate queries and keys by row and column: the first half of a head's pairs by the row, the second
by the column.

In Qwen2.5-VL, a patch attends only to patches of its window in most layers. Then the patches of each window follow each other too. In
Qwen3-VL, the sum of four vectors of a table is added to a patch, each multiplied by its share, and a row has the results of several layers.
"""

from __future__ import annotations

import numpy as np

from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net
from compiler.frontend.layers.tower import COLOURS, TowerLayers, normalised
from compiler.frontend.rope import Rope
from compiler.frontend.vision import Tower, Vision
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, Var
from compiler.ops.elementwise import GELU, MULTIPLY
from compiler.ops.embedding import EMBEDDING, ROPE_ANGLES
from compiler.ops.manipulate import CONCAT, EXPAND_DIMS, PERMUTE_DIMS
from compiler.ops.reduce import SUM


class AnySize(TowerLayers):
    def __init__(
        self, net: Net, vision: Vision, squares: Dim, crops: tuple[Var, Var], windows: tuple[Var, ...], taps: tuple[Var, ...]
    ) -> None:
        super().__init__(net, vision, squares * vision.num_patches, crops[0], _starts(net, crops[1]))
        self.squares, self.taps = squares, taps
        self.windows = (windows[0], _starts(net, windows[1])) if windows else None

    def rows(self, patches: Var, points: Var, size: int) -> Var:
        self.angles = self.rotations(points)
        x, deep = self.embedded(patches), list[Var]()
        for number in range(self.vision.num_layers):
            x = self.layer(x, number)
            if number in self.vision.deep_layers:
                deep.append(self.merged(self.joined(x), f"{self.encoder}deepstack_merger_list.{len(deep)}.", size, norm="norm"))
        norm = "norm" if self.vision.tower is Tower.QWEN3 else "ln_q"
        last = self.merged(self.joined(self.norm(x, f"{self.connector}{norm}")), self.connector, size)
        return self.net.call(CONCAT, last, *deep, axis=1) if deep else last

    def rotations(self, points: Var) -> tuple[Var, Var]:
        """Return the cosines and sines of patches, [places, pairs]."""
        net, head = self.net, self.vision.hidden_size // self.vision.num_heads
        frequencies, _ = Rope(self.vision.theta, head // 2).frequencies(1)
        both = net.call(ROPE_ANGLES, points, Constant(frequencies))  # [squares, patches, 2, pairs of each]
        cosines, sines = (net.reshape(net.field(both, part), self.places, head // 2) for part in range(2))
        return cosines, sines

    def embedded(self, patches: Var) -> Var:
        """Return the vectors of patches, [places, size]. The encoder was trained on pairs of frames, and sees an image twice."""
        net, vision = self.net, self.vision
        size, patch = vision.hidden_size, vision.patch_size
        w = net.as_f32(net.weight(f"{self.encoder}{self.names.patch}.weight", size, COLOURS, vision.num_frames, patch, patch))
        once = net.call(PERMUTE_DIMS, net.call(SUM, w, axes=[2]), axes=(0, 2, 3, 1))
        bias = net.vector(f"{self.encoder}{self.names.patch}.bias", size) if vision.tower is Tower.QWEN3 else None
        patches = net.reshape(patches, self.places, patch**2 * COLOURS)
        x = net.product(normalised(net, vision, patches), net.reshape(once, size, patch**2 * COLOURS), bias, format=self.format)
        return net.add(x, self.positions()) if self.taps else x

    def positions(self) -> Var:
        """Return the vectors of the table of positions, interpolated for each patch: [places, size]."""
        net, vision, (taps, shares) = self.net, self.vision, self.taps
        table = net.as_f32(net.weight(f"{self.encoder}{self.names.positions}", vision.table_edge**2, vision.hidden_size))
        parts = net.call(MULTIPLY, net.call(EMBEDDING, table, taps), net.call(EXPAND_DIMS, shares, axes=2))
        return net.call(SUM, parts, axes=[1])

    def joined(self, x: Var) -> Var:
        """Return the vectors of the patches of each square as one, [squares, patches * size]."""
        return self.net.reshape(x, self.squares, self.vision.hidden_size * self.vision.num_patches)

    def merged(self, x: Var, prefix: str, size: int, *, norm: str = "") -> Var:
        """Return a row for each square, [squares, size]: two matrices, after a norm if it has a name."""
        wide = self.vision.hidden_size * self.vision.num_patches
        if norm:
            x = self.net.layer_norm(x, f"{prefix}{norm}", wide, self.vision.norm_eps)
        first, second = ("linear_fc1", "linear_fc2") if self.vision.tower is Tower.QWEN3 else ("mlp.0", "mlp.2")
        hidden = self.net.call(GELU, self.linear(x, f"{prefix}{first}", wide, wide))
        return self.linear(hidden, f"{prefix}{second}", wide, size)

    def groups(self, number: int) -> tuple[Var, Var]:
        return super().groups(number) if self.windows is None or number in self.vision.whole_layers else self.windows

    def norm(self, x: Var, name: str) -> Var:
        if self.vision.tower is not Tower.QWEN2_5:
            return super().norm(x, name)
        return self.net.rms_norm(x, name, self.vision.hidden_size, self.vision.norm_eps)

    def fed(self, h: Var, prefix: str) -> Var:
        if self.vision.tower is not Tower.QWEN2_5:
            return super().fed(h, prefix)
        net, size, wide = self.net, self.vision.hidden_size, self.vision.intermediate_size
        gate, up = (self.linear(h, f"{prefix}{name}_proj", size, wide) for name in ("gate", "up"))
        gated = net.call(MULTIPLY, plain_activation(net, self.vision.activation, gate), up)
        return self.linear(gated, f"{prefix}down_proj", wide, size)


def _starts(net: Net, ends: Var) -> Var:
    """Return where groups of patches start, [groups + 1], as ragged attention reads it."""
    return net.call(CONCAT, Constant(np.zeros(1, np.int32)), ends, axis=0)
