"""Emit the encoder SigLIP 2 for images of any size (NaFlex), with the connector of LFM2-VL or, in a model that embeds images, with that of
SigLIP."""

from __future__ import annotations

from compiler.frontend.any_size import AnySize
from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.squares import CONNECTOR_NORM_EPS
from compiler.ir.graph.atoms import Var


class Siglip2(AnySize):
    """SigLIP 2's encoder. A patch gets a position vector, interpolated from a table that is scaled to the size of its crop."""

    def rows(self, patches: Var, points: Var, config: ModelConfig) -> Var:
        net, vision = self.net, self.vision
        x = net.add(self.embedded(patches, bias=True), self.positions())
        for number in range(vision.num_layers):
            x = self.layer(x, number)
        x = self.norm(x, f"{self.encoder}{self.names.last_norm}")
        return self.probed(x) if vision.is_whole else self.connected(x, config.hidden_size)

    def patch_matrix(self, name: str) -> Var:
        return self.net.weight(name, self.vision.hidden_size, self.vision.patch_size**2 * COLOURS)

    def connected(self, x: Var, size: int) -> Var:
        """Return a row for each square, [squares, size]."""
        net, vision, name = self.net, self.vision, self.connector
        assert vision.connector_activation is not None
        joined, wide = self.joined(x), vision.hidden_size * vision.num_patches
        if vision.connector_norm:
            joined = net.layer_norm(joined, f"{name}layer_norm", wide, CONNECTOR_NORM_EPS)
        bias, middle = vision.connector_bias, vision.connector_size or size
        hidden = net.linear(joined, f"{name}linear_1", wide, middle, bias=bias, format=self.format)
        hidden = plain_activation(net, vision.connector_activation, hidden)
        return net.linear(hidden, f"{name}linear_2", middle, size, bias=bias, format=self.format)
