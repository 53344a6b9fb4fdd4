"""The program `see` for crops of any size.

    see(patches[q, m, values], points[q, m, 2], crop_ids[q * m], ends[n], (window_ids[q * m], window_ends[w])?,
        (taps[q * m, 4], shares[q * m, 4])?, (shares[q * m, e])?) -> rows[q, depths * hidden size]

Operands with a question mark exist only for some encoders. The `n` crops of a call consist of `q` squares of `m` patches, and each square
becomes one row. A patch is `values` bytes, and its point is its row and column in its crop. `crop_ids` has the crop of each patch, and
`ends` the index after the last patch of each crop. The program scales and normalises the bytes, multiplies each patch by a matrix, and
applies the layers of the encoder. The connector then turns the results for the patches of a square into a row. Except in SigLIP 2, RoPE
rotates queries and keys by row and column.

In Qwen2.5-VL, patches are divided into `w` windows of adjacent patches. In most layers, a patch attends only to patches of its window;
`window_ids` and `window_ends` describe windows as `crop_ids` and `ends` describe crops. In Qwen3-VL, each patch gets a position vector: the
sum of four vectors of a table, whose indices are `taps`, times their weights `shares`. A row then has the results of several layers
(`depths`). In SigLIP 2 and GLM-4.1V, the position vector is the sum of all `e` vectors of the table times `shares`, so there are no `taps`.
In Gemma 4, the position vector is the sum of a vector for the row and one for the column, so there are neither `taps` nor `shares`. In a
model that embeds images, a whole crop becomes one row.
"""

from __future__ import annotations

import numpy as np

from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net
from compiler.frontend.layers.tower import COLOURS, TowerLayers, normalised
from compiler.frontend.vision import Vision
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ops.elementwise import MULTIPLY, SUBTRACT
from compiler.ops.embedding import EMBEDDING
from compiler.ops.manipulate import CONCAT, PERMUTE_DIMS
from compiler.ops.reduce import SUM


class AnySize(TowerLayers):
    """Build the layers that all encoders of crops of any size share. Each encoder is a subclass with a method `rows`, which returns the
    rows of squares. `crops` are the operands `crop_ids` and `ends` of the program. `windows` are the operands `window_ids` and
    `window_ends`, or empty. `taps` are the operands `taps` and `shares`, only `shares`, or empty."""

    def __init__(
        self, net: Net, vision: Vision, squares: Dim, crops: tuple[Var, Var], windows: tuple[Var, ...], taps: tuple[Var, ...]
    ) -> None:
        super().__init__(net, vision, squares * vision.num_patches, crops[0], _starts(net, crops[1]))
        self.squares, self.ends, self.taps = squares, crops[1], taps
        self.windows = (windows[0], _starts(net, windows[1])) if windows else None

    def embedded(self, patches: Var, *, bias: bool = False) -> Var:
        """Return the vectors of patches, [places, size]: the product of each patch and the matrix of patches."""
        net, vision, name = self.net, self.vision, f"{self.encoder}{self.names.patch}"
        x = normalised(net, vision, net.reshape(patches, self.places, vision.patch_size**2 * COLOURS))
        given = net.vector(f"{name}.bias", vision.hidden_size) if bias else None
        return net.product(x, self.patch_matrix(f"{name}.weight"), given, format=self.format)

    def patch_matrix(self, name: str) -> Var:
        """Return the matrix that multiplies patches, [size, values], with the values of a pixel next to each other. Most checkpoints order
        the values by colour first. An encoder that was trained on pairs of frames has a matrix for each frame. The result is the sum of
        these matrices, since an image counts as a pair of equal frames."""
        net, size, patch, frames = self.net, self.vision.hidden_size, self.vision.patch_size, self.vision.num_frames
        if frames:
            w = net.call(SUM, net.as_f32(net.weight(name, size, COLOURS, frames, patch, patch)), axes=[2])
        else:
            w = net.weight(name, size, COLOURS, patch, patch)
        return net.reshape(net.call(PERMUTE_DIMS, w, axes=(0, 2, 3, 1)), size, patch**2 * COLOURS)

    def positions(self) -> Var:
        """Return the position vector of each patch, [places, size], if the encoder scales its table of positions to the crop. The vector is
        interpolated: it is the sum of all vectors of the table times `shares`."""
        net, vision, (shares,) = self.net, self.vision, self.taps
        table = net.weight(f"{self.encoder}{self.names.positions}", vision.table_edge**2, vision.hidden_size)
        return net.product(shares, net.call(PERMUTE_DIMS, table, axes=(1, 0)), format=self.format)

    def one_of_each(self, x: Var) -> Var:
        lasts = self.net.call(SUBTRACT, self.ends, ScalarValue(1, "i32"))
        return self.net.call(EMBEDDING, x, lasts)

    def joined(self, x: Var) -> Var:
        """Join the vectors of the patches of each square to one vector, [squares, patches * size]."""
        return self.net.reshape(x, self.squares, self.vision.hidden_size * self.vision.num_patches)

    def groups(self, number: int) -> tuple[Var, Var]:
        return super().groups(number) if self.windows is None or number in self.vision.whole_layers else self.windows


class LikeDecoders(AnySize):
    """Build layers that have the RMS norms and the gated MLP of decoders."""

    def norm(self, x: Var, name: str) -> Var:
        return self.net.rms_norm(x, name, self.vision.hidden_size, self.vision.norm_eps)

    def fed(self, h: Var, prefix: str) -> Var:
        net, size, wide = self.net, self.vision.hidden_size, self.vision.intermediate_size
        gate, up = (self.linear(h, f"{prefix}{name}_proj", size, wide) for name in ("gate", "up"))
        gated = net.call(MULTIPLY, plain_activation(net, self.vision.activation, gate), up)
        return self.linear(gated, f"{prefix}down_proj", wide, size)


def _starts(net: Net, ends: Var) -> Var:
    """Return the index of the first patch of each group, and then the number of patches, [groups + 1], for ragged attention. A group is a
    crop or a window."""
    return net.call(CONCAT, Constant(np.zeros(1, np.int32)), ends, axis=0)
