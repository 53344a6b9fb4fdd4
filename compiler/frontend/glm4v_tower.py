"""Emit the encoder of GLM-4.1V: patches of images of any size, with the layers of decoders and a table of positions that is scaled to each
crop. A convolution joins the patches of each square, and a gated perceptron follows."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.qwen_towers import Qwen2_5
from compiler.frontend.squares import CONNECTOR_NORM_EPS
from compiler.ir.graph.atoms import Var
from compiler.ops.elementwise import GELU, MULTIPLY
from compiler.ops.manipulate import PERMUTE_DIMS


class Glm4v(Qwen2_5):
    bias = False

    def rows(self, patches: Var, points: Var, config: ModelConfig) -> Var:
        self.angles = self.rotations(points)
        x = self.norm(self.embedded(patches, bias=True), f"{self.encoder}post_conv_layernorm")
        x = self.net.add(x, self.positions())
        for number in range(self.vision.num_layers):
            x = self.layer(x, number)
        return self.connected(self.united(self.norm(x, f"{self.encoder}post_layernorm"), config.hidden_size), config.hidden_size)

    def united(self, x: Var, size: int) -> Var:
        """Return a vector for each square, [squares, size]: the result of a convolution over the patches of the square."""
        net, own, merge, name = self.net, self.vision.hidden_size, self.vision.merge, f"{self.encoder}downsample"
        w = net.call(PERMUTE_DIMS, net.weight(f"{name}.weight", size, own, merge, merge), axes=(0, 2, 3, 1))
        matrix = net.reshape(w, size, merge**2 * own)
        return net.product(self.joined(x), matrix, net.vector(f"{name}.bias", size), format=self.format)

    def connected(self, x: Var, size: int) -> Var:
        """Return a row for each square, [squares, size]."""
        net, name, wide = self.net, self.connector, self.vision.connector_size
        x = net.layer_norm(self.linear(x, f"{name}proj", size, size), f"{name}post_projection_norm", size, CONNECTOR_NORM_EPS)
        x = net.call(GELU, x)
        gate, up = (self.linear(x, f"{name}{part}_proj", size, wide) for part in ("gate", "up"))
        gated = net.call(MULTIPLY, plain_activation(net, self.vision.activation, gate), up)
        return self.linear(gated, f"{name}down_proj", wide, size)
