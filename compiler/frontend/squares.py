"""The program `see` for crops that are squares of one size.

    see(pixels[n, side, side * 3], crop_ids[n * places], starts[n + 1]) -> rows[n * rows of a crop, hidden size]

The program scales and normalises the bytes, multiplies each patch by a matrix, adds the vector of its place, and applies the layers of the
encoder. A place is a patch or the class token. The connector then turns the patches of each small square, or a whole crop, into one row.
"""

from __future__ import annotations

from typing import assert_never

from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net
from compiler.frontend.layers.tower import COLOURS, PROJECTION, TowerLayers, normalised
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import ShapeValue, Var
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, PERMUTE_DIMS
from compiler.ops.reduce import MEAN

CONNECTOR_NORM_EPS = 1e-5


class Squares(TowerLayers):
    def __init__(self, net: Net, vision: Vision, n: Dim, crop_ids: Var, starts: Var) -> None:
        super().__init__(net, vision, n * vision.num_places, crop_ids, starts)
        self.n = n

    def rows(self, pixels: Var, size: int) -> Var:
        net, vision = self.net, self.vision
        x = self.embedded(pixels)
        for number in range(vision.num_layers):
            x = self.layer(x, number)
        if vision.last_norm:
            x = net.layer_norm(x, f"{self.encoder}{self.names.last_norm}", vision.hidden_size, vision.norm_eps)
        return self.connected(x if vision.connector is Connector.CLASS else self.without_class(x), size)

    # --- the encoder -------------------------------------------------------------------------------------------------------

    def embedded(self, pixels: Var) -> Var:
        """Return the places with their positions, [places, size]."""
        net, vision, name = self.net, self.vision, f"{self.encoder}{self.names.patch}"
        edge, patch, size = vision.patches_per_edge, vision.patch_size, vision.hidden_size
        values = COLOURS * patch**2
        covered = edge * patch  # pixels beyond the last whole patch are not seen
        whole = net.slice(net.slice(pixels, 1, 0, covered), 2, 0, covered * COLOURS) if covered < vision.crop_size else pixels
        lines = net.reshape(whole, self.n * edge, patch, edge, patch * COLOURS)
        patches = net.reshape(net.call(PERMUTE_DIMS, lines, axes=(0, 2, 1, 3)), self.n * vision.num_patches, values)
        x = normalised(net, vision, patches)
        w = net.call(PERMUTE_DIMS, net.weight(f"{name}.weight", size, COLOURS, patch, patch), axes=(0, 2, 3, 1))
        bias = None if vision.tower is Tower.CLIP else net.vector(f"{name}.bias", size)
        x = net.product(x, net.reshape(w, size, values), bias, format=self.format)
        x = net.reshape(x, self.n, vision.num_patches, size)
        if vision.has_class:
            first = net.as_f32(self.table(self.names.class_token, 1))
            firsts = net.call(BROADCAST_TO, first, ShapeValue((self.n, Dim.of(1), Dim.of(size))))
            x = net.call(CONCAT, firsts, x, axis=1)
        placed = net.add(x, net.as_f32(self.table(self.names.positions, vision.num_places)))
        x = net.reshape(placed, self.places, size)
        return net.layer_norm(x, f"{self.encoder}pre_layrnorm", size, vision.norm_eps) if vision.tower is Tower.CLIP else x

    def table(self, name: str, count: int) -> Var:
        """Return `count` vectors that the checkpoint has for places, [1, count, size]. The checkpoint stores them with one, two or three
        axes."""
        net, size, full = self.net, self.vision.hidden_size, f"{self.encoder}{name}"
        if self.vision.tower is Tower.INTERN:
            return net.weight(full, 1, count, size)
        return net.reshape(net.weight(full, size) if name == self.names.class_token else net.weight(full, count, size), 1, count, size)

    def without_class(self, x: Var) -> Var:
        net, vision = self.net, self.vision
        if not vision.has_class:
            return x
        patches = net.slice(net.reshape(x, self.n, vision.num_places, vision.hidden_size), 1, 1, vision.num_places)
        return net.reshape(patches, self.n * vision.num_patches, vision.hidden_size)

    # --- the connector -----------------------------------------------------------------------------------------------------

    def connected(self, x: Var, size: int) -> Var:
        """Return one row for each square of `merge` by `merge` patches, [rows, size]."""
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
                first = net.slice(net.reshape(x, self.n, vision.num_places, own), 1, 0, 1)
                return net.linear(net.reshape(first, self.n, own), PROJECTION, own, size, format=self.format)
            case Connector.PROBE:
                return self.probed(x)
            case _:
                assert_never(vision.connector)

    def probed(self, x: Var) -> Var:
        """Return what a learned query finds in each crop. All places of a crop ask the same, and the answer to the first one is taken."""
        net, vision, own, name = self.net, self.vision, self.vision.hidden_size, f"{self.encoder}head."
        heads, size = vision.num_heads, own // vision.num_heads
        w = net.weight(f"{name}attention.in_proj_weight", 3 * own, own)
        bias = net.vector(f"{name}attention.in_proj_bias", 3 * own)
        probe = net.as_f32(net.reshape(net.weight(f"{name}probe", 1, 1, own), 1, own))
        (asked, found) = (
            net.product(given, net.slice(w, 0, *part), net.slice(bias, 0, *part), format=self.format)
            for given, part in ((probe, (0, own)), (x, (own, 3 * own)))
        )
        places = ShapeValue((self.places, Dim.of(heads), Dim.of(size)))
        q = net.call(BROADCAST_TO, net.reshape(asked, 1, heads, size), places)
        both = net.reshape(found, self.places, 2 * heads, size)
        k, v = (net.slice(both, 1, part * heads, (part + 1) * heads) for part in range(2))
        mixed = net.call(RAGGED_ATTENTION, q, k, v, self.crop_ids, self.starts, scale=size**-0.5)
        first = net.slice(net.reshape(mixed, self.n, vision.num_places, own), 1, 0, 1)
        h = self.linear(net.reshape(first, self.n, own), f"{name}attention.out_proj", own, own)
        return net.add(h, self.fed(self.norm(h, f"{name}layernorm"), f"{name}mlp."))

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
