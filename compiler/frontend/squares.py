"""The program `see` for crops that are squares of one size.

    see(pixels[n, side, side * 3], crop_ids[n * places], starts[n + 1]) -> rows[n * rows of a crop, hidden size]

The program scales and normalises the bytes, multiplies each patch by a matrix, adds its position vector, and applies the layers of the
encoder. A place is a patch or the class token. The connector then turns each square of `merge` by `merge` patches, or a whole crop, into
one row. In a model that embeds images, a row has the size of an embedding instead of the decoder's hidden size.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net
from compiler.frontend.layers.tower import COLOURS, PROJECTION, TowerLayers, normalised
from compiler.frontend.rope import Rope
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, ShapeValue, Var
from compiler.ops.elementwise import GELU
from compiler.ops.embedding import ROPE_ANGLES
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, PERMUTE_DIMS
from compiler.ops.reduce import MEAN

CONNECTOR_NORM_EPS = 1e-5


class Squares(TowerLayers):
    """Builds the encoder of `n` crops of one size, and its connector."""

    def __init__(self, net: Net, vision: Vision, n: Dim, crop_ids: Var, starts: Var) -> None:
        super().__init__(net, vision, n * vision.num_places, crop_ids, starts)
        self.n = n
        self.class_is_last = self.interleaved = vision.tower is Tower.LLAMA4

    def rows(self, pixels: Var, size: int) -> Var:
        net, vision = self.net, self.vision
        x = self.embedded(pixels)
        if vision.tower is Tower.LLAMA4:
            self.angles = self.rotations()
        for number in range(vision.num_layers):
            x = self.layer(x, number)
        if vision.last_norm:
            x = net.layer_norm(x, f"{self.encoder}{self.names.last_norm}", vision.hidden_size, vision.norm_eps)
        return self.connected(x if vision.connector is Connector.CLASS else self.without_class(x), size)

    # --- the encoder -------------------------------------------------------------------------------------------------------

    def embedded(self, pixels: Var) -> Var:
        """Return the vectors of all places, with their position vectors added, [places, size]."""
        net, vision, name = self.net, self.vision, f"{self.encoder}{self.names.patch}"
        edge, patch, size = vision.patches_per_edge, vision.patch_size, vision.hidden_size
        values = COLOURS * patch**2
        covered = edge * patch  # pixels beyond the last whole patch are not read
        whole = net.slice(net.slice(pixels, 1, 0, covered), 2, 0, covered * COLOURS) if covered < vision.crop_size else pixels
        lines = net.reshape(whole, self.n * edge, patch, edge, patch * COLOURS)
        patches = net.reshape(net.call(PERMUTE_DIMS, lines, axes=(0, 2, 1, 3)), self.n * vision.num_patches, values)
        x = normalised(net, vision, patches)
        if vision.tower is Tower.LLAMA4:
            given = net.reshape(net.weight(f"{name}.weight", size, values), size, COLOURS, patch, patch)
        else:
            given = net.weight(f"{name}.weight", size, COLOURS, patch, patch)
        w = net.call(PERMUTE_DIMS, given, axes=(0, 2, 3, 1))
        # The matrix of patches has a bias unless a norm precedes the layers.
        bias = None if self.names.first_norm else net.vector(f"{name}.bias", size)
        x = net.product(x, net.reshape(w, size, values), bias, format=self.format)
        x = net.reshape(x, self.n, vision.num_patches, size)
        if vision.has_class:
            first = net.as_f32(self.table(self.names.class_token, 1))
            firsts = net.call(BROADCAST_TO, first, ShapeValue((self.n, Dim.of(1), Dim.of(size))))
            x = net.call(CONCAT, *((x, firsts) if self.class_is_last else (firsts, x)), axis=1)
        placed = net.add(x, net.as_f32(self.table(self.names.positions, vision.num_places)))
        x = net.reshape(placed, self.places, size)
        return self.norm(x, f"{self.encoder}{self.names.first_norm}") if self.names.first_norm else x

    def rotations(self) -> tuple[Var, Var]:
        """Return RoPE's cosines and sines, each [places, pairs]. RoPE rotates the first half of a head's pairs by the column, and the
        second half by the row, but not the class token."""
        net, vision, edge = self.net, self.vision, self.vision.patches_per_edge
        head = vision.hidden_size // vision.num_heads
        rows, columns = np.divmod(np.arange(vision.num_patches, dtype=np.int32), np.int32(edge))
        points = np.concatenate([np.stack([columns + 1, rows + 1], axis=1), np.zeros((1, 2), np.int32)])
        frequencies, _ = Rope(vision.theta, head // 2).frequencies(1)
        both = net.call(ROPE_ANGLES, Constant(points), Constant(frequencies))  # [places of a crop, 2, pairs of each]
        every = ShapeValue((self.n, Dim.of(vision.num_places), Dim.of(head // 2)))
        of_crop = (net.reshape(net.field(both, part), 1, vision.num_places, head // 2) for part in range(2))
        cosines, sines = (net.reshape(net.call(BROADCAST_TO, part, every), self.places, head // 2) for part in of_crop)
        return cosines, sines

    def table(self, name: str, count: int) -> Var:
        """Return `count` vectors that the checkpoint has for places, [1, count, size]. The checkpoint stores them with one, two or three
        axes."""
        net, size, full = self.net, self.vision.hidden_size, f"{self.encoder}{name}"
        if self.vision.tower is Tower.INTERN:
            return net.weight(full, 1, count, size)
        return net.reshape(net.weight(full, size) if name == self.names.class_token else net.weight(full, count, size), 1, count, size)

    def without_class(self, x: Var) -> Var:
        """Return the vectors of patches, [patches of all crops, size], without those of class tokens."""
        net, vision = self.net, self.vision
        if not vision.has_class:
            return x
        first = 0 if self.class_is_last else 1
        patches = net.slice(net.reshape(x, self.n, vision.num_places, vision.hidden_size), 1, first, first + vision.num_patches)
        return net.reshape(patches, self.n * vision.num_patches, vision.hidden_size)

    # --- the connector -----------------------------------------------------------------------------------------------------

    def connected(self, x: Var, size: int) -> Var:
        """Return one row for each square of `merge` by `merge` patches, or for each whole crop: [rows, size]."""
        net, vision, name, own = self.net, self.vision, self.connector, self.vision.hidden_size
        match vision.connector:
            case Connector.JOINED:
                return net.linear(self.joined(x), f"{name}modality_projection.proj", own * vision.merge**2, size, format=self.format)
            case Connector.AVERAGED:
                mean = net.reshape(net.call(MEAN, self.squares(x), axes=[1]), self.n * vision.num_rows, own)
                normed = net.rms_norm(mean, f"{name}mm_soft_emb_norm", own, vision.norm_eps, offset=1.0)
                w = net.call(PERMUTE_DIMS, net.weight(f"{name}mm_input_projection_weight", own, size), axes=(1, 0))
                return net.product(normed, w, format=self.format)
            case Connector.PERCEPTRON:
                assert vision.connector_activation is not None
                bias, joined, wide_size = vision.connector_bias, self.joined(x), own * vision.merge**2
                if vision.connector_norm:
                    joined = net.layer_norm(joined, f"{name}layer_norm", wide_size, CONNECTOR_NORM_EPS)
                wide = net.linear(joined, f"{name}linear_1", wide_size, size, bias=bias, format=self.format)
                wide = plain_activation(net, vision.connector_activation, wide)
                return net.linear(wide, f"{name}linear_2", size, size, bias=bias, format=self.format)
            case Connector.CLASS:
                return net.linear(self.one_of_each(x), PROJECTION, own, size, format=self.format)
            case Connector.ADAPTER:
                return self.adapted(self.joined(x), size)
            case Connector.PROBE:
                return self.probed(x)
            case _:
                assert_never(vision.connector)

    def one_of_each(self, x: Var) -> Var:
        own = self.vision.hidden_size
        first = self.net.slice(self.net.reshape(x, self.n, self.vision.num_places, own), 1, 0, 1)
        return self.net.reshape(first, self.n, own)

    def adapted(self, x: Var, size: int) -> Var:
        """Apply the adapter of Llama 4, two matrices with an activation after each, and project the result to rows of `size` elements."""
        net, vision, wide = self.net, self.vision, self.vision.connector_size
        name, inputs = f"{self.encoder}vision_adapter.mlp.", vision.hidden_size * vision.merge**2
        for part, in_size in (("fc1", inputs), ("fc2", wide)):
            x = net.call(GELU, net.linear(x, f"{name}{part}", in_size, wide, format=self.format))
        return net.linear(x, f"{self.connector}linear_1", wide, size, format=self.format)

    def joined(self, x: Var) -> Var:
        """Return the patches of each square in one row, line by line: [rows, merge * merge * size]."""
        if self.vision.merge == 1:
            return x
        return self.net.reshape(self.squares(x), self.n * self.vision.num_rows, self.vision.merge**2 * self.vision.hidden_size)

    def squares(self, x: Var) -> Var:
        """Return the patches of each square, line by line: [rows, merge * merge, size]."""
        net, step, size = self.net, self.vision.merge, self.vision.hidden_size
        small = self.vision.patches_per_edge // step
        lines = net.reshape(x, self.n * small, step, small, step * size)
        return net.reshape(net.call(PERMUTE_DIMS, lines, axes=(0, 2, 1, 3)), self.n * self.vision.num_rows, step * step, size)
