"""Emit the encoders of images of Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni, Qwen3-VL and GLM-4.1V."""

from __future__ import annotations

from compiler.frontend.any_size import AnySize, LikeDecoders
from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.rope import Rope
from compiler.frontend.squares import CONNECTOR_NORM_EPS
from compiler.ir.graph.atoms import Constant, Var
from compiler.ops.elementwise import GELU, MULTIPLY
from compiler.ops.embedding import EMBEDDING, ROPE_ANGLES
from compiler.ops.manipulate import CONCAT, EXPAND_DIMS, PERMUTE_DIMS
from compiler.ops.reduce import SUM


class Qwen2(AnySize):
    """Qwen2-VL's encoder. RoPE rotates the first half of a head's pairs by the row, and the second half by the column, at the same
    frequencies."""

    last_norm = "ln_q"
    matrices = "mlp.0", "mlp.2"

    def rows(self, patches: Var, points: Var, config: ModelConfig) -> Var:
        self.angles = self.rotations(points)
        x = self.embedded(patches)
        for number in range(self.vision.num_layers):
            x = self.layer(x, number)
        return self.last(x, config.hidden_size)

    def rotations(self, points: Var) -> tuple[Var, Var]:
        """Return RoPE's cosines and sines, each [places, pairs]."""
        net, head = self.net, self.vision.hidden_size // self.vision.num_heads
        frequencies, _ = Rope(self.vision.theta, head // 2).frequencies(1)
        both = net.call(ROPE_ANGLES, points, Constant(frequencies))  # [squares, patches, 2, pairs of each]
        cosines, sines = (net.reshape(net.field(both, part), self.places, head // 2) for part in range(2))
        return cosines, sines

    def last(self, x: Var, size: int) -> Var:
        """Return a row for each square, [squares, size], from the results of the last layer."""
        return self.merged(self.joined(self.norm(x, f"{self.connector}{self.last_norm}")), self.connector, size)

    def merged(self, joined: Var, prefix: str, size: int) -> Var:
        """Apply two matrices, with GELU between them, to the joined patches of each square."""
        wide = self.vision.hidden_size * self.vision.num_patches
        hidden = self.net.call(GELU, self.linear(joined, f"{prefix}{self.matrices[0]}", wide, wide))
        return self.linear(hidden, f"{prefix}{self.matrices[1]}", wide, size)


class Qwen2_5(LikeDecoders, Qwen2):
    """The encoder of Qwen2.5-VL and Qwen2.5-Omni: in most layers, a patch attends only to patches of its window. Layers have the norms and
    the MLP of decoders."""


class Qwen3(Qwen2):
    """Qwen3-VL's encoder: it interpolates a table of positions, and returns the results of several layers (depths) in each row."""

    last_norm = "norm"
    matrices = "linear_fc1", "linear_fc2"

    def rows(self, patches: Var, points: Var, config: ModelConfig) -> Var:
        self.angles = self.rotations(points)
        x, deep = self.net.add(self.embedded(patches, bias=True), self.positions()), list[Var]()
        for number in range(self.vision.num_layers):
            x = self.layer(x, number)
            if number in self.vision.deep_layers:
                deep.append(self.deep(x, f"{self.encoder}deepstack_merger_list.{len(deep)}.", config.hidden_size))
        last = self.last(x, config.hidden_size)
        return self.net.call(CONCAT, last, *deep, axis=1) if deep else last

    def deep(self, x: Var, prefix: str, size: int) -> Var:
        """Return a row for each square, [squares, size], from the results of a layer."""
        joined = self.joined(x)
        wide = self.vision.hidden_size * self.vision.num_patches
        return self.merged(self.net.layer_norm(joined, f"{prefix}norm", wide, self.vision.norm_eps), prefix, size)

    def positions(self) -> Var:
        """Return the vectors of the table of positions, interpolated for each patch: [places, size]."""
        net, vision, (taps, shares) = self.net, self.vision, self.taps
        table = net.as_f32(net.weight(f"{self.encoder}{self.names.positions}", vision.table_edge**2, vision.hidden_size))
        parts = net.call(MULTIPLY, net.call(EMBEDDING, table, taps), net.call(EXPAND_DIMS, shares, axes=2))
        return net.call(SUM, parts, axes=[1])


class Glm4v(Qwen2_5):
    """GLM-4.1V's encoder: its table of positions is scaled to each crop. A convolution joins the patches of each square, and a gated MLP
    follows."""

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
