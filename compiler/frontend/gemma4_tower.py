"""Emit the encoder of Gemma 4: images of any size are cut into patches, and the connector averages the patches of each square, which
becomes one token."""

from __future__ import annotations

from compiler.frontend.any_size import LikeDecoders
from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.rope import Rope
from compiler.ir.graph.atoms import Constant, Var
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import MAXIMUM, MINIMUM, MULTIPLY, SUBTRACT
from compiler.ops.embedding import EMBEDDING, ROPE, ROPE_ANGLES
from compiler.ops.manipulate import CONCAT
from compiler.ops.reduce import MEAN

NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"


class Gemma4(LikeDecoders):
    """Gemma 4's encoder. RoPE rotates the first half of each query and key head by the patch's column, and the second half by its row.
    Attention and the MLP each have a norm before and after."""

    bias = False

    def rows(self, patches: Var, points: Var, config: ModelConfig) -> Var:
        self.turns = self.rotations(points)
        x = self.net.add(self.embedded(patches), self.vectors_of(points))
        for number in range(self.vision.num_layers):
            x = self.layer(x, number)
        return self.connected(x, config.hidden_size)

    def patch_matrix(self, name: str) -> Var:
        return self.net.weight(name, self.vision.hidden_size, self.vision.patch_size**2 * COLOURS)

    def vectors_of(self, points: Var) -> Var:
        """Return the position vector of each patch, [places, size]: the sum of a vector for its column and one for its row."""
        net, count, size = self.net, self.vision.table_edge, self.vision.hidden_size
        tables = net.weight(f"{self.encoder}{self.names.positions}", 2, count, size)
        found = (
            net.call(EMBEDDING, net.as_f32(net.reshape(net.slice(tables, 0, part, part + 1), count, size)), self.along(points, part))
            for part in range(2)
        )
        return net.add(*found)

    def along(self, points: Var, part: int) -> Var:
        """Return the columns (part 0) or the rows (part 1) of patches, [places]."""
        axis = 1 - part
        return self.net.reshape(self.net.slice(points, 2, axis, axis + 1), self.places)

    def rotations(self, points: Var) -> tuple[tuple[Var, Var], ...]:
        """Return RoPE's cosines and sines, each [places, pairs]: by the columns of patches for the first half of a head, and by the rows
        for the second half."""
        net = self.net
        frequencies, _ = Rope(self.vision.theta, self.vision.hidden_size // self.vision.num_heads // 2).frequencies(1)
        both = (net.call(ROPE_ANGLES, self.along(points, part), Constant(frequencies)) for part in range(2))
        return tuple((net.field(angles, 0), net.field(angles, 1)) for angles in both)

    def layer(self, x: Var, number: int) -> Var:
        prefix = f"{self.encoder}{self.names.layers}.{number}."
        mixed = self.attended(self.norm(x, f"{prefix}{NORMS[0]}"), f"{prefix}self_attn.", number)
        x = self.net.add(x, self.norm(mixed, f"{prefix}{NORMS[1]}"))
        fed = self.fed(self.norm(x, f"{prefix}{NORMS[2]}"), f"{prefix}mlp.")
        return self.net.add(x, self.norm(fed, f"{prefix}{NORMS[3]}"))

    def attended(self, h: Var, prefix: str, number: int) -> Var:
        net, size, heads, eps = self.net, self.vision.hidden_size, self.vision.num_heads, self.vision.norm_eps
        head = size // heads
        q, k, v = (net.reshape(self.linear(h, f"{prefix}{part}_proj", size, size), self.places, heads, head) for part in "qkv")
        q, k = (self.rotated(net.rms_norm(part, f"{prefix}{name}_norm", head, eps), head) for part, name in ((q, "q"), (k, "k")))
        mixed = net.call(RAGGED_ATTENTION, q, k, net.unit_norm(v, head, eps), *self.groups(number), scale=1.0)
        return self.linear(net.reshape(mixed, self.places, size), f"{prefix}o_proj", size, size)

    def rotated(self, x: Var, head: int) -> Var:
        halves = (self.net.slice(x, 2, part * head // 2, (part + 1) * head // 2) for part in range(2))
        return self.net.call(CONCAT, *(self.net.call(ROPE, half, *self.turns[part]) for part, half in enumerate(halves)), axis=2)

    def linear(self, x: Var, name: str, in_size: int, size: int) -> Var:
        """Multiply by a matrix. In some models, input and output are clipped to ranges that the checkpoint stores with the matrix."""
        inner = self.net.linear(self.clipped(x, f"{name}.input"), f"{name}.linear", in_size, size, format=self.format)
        return self.clipped(inner, f"{name}.output")

    def clipped(self, x: Var, name: str) -> Var:
        if not self.vision.clips:
            return x
        least, most = (self.net.as_f32(self.net.reshape(self.net.weight(f"{name}_{end}"), 1)) for end in ("min", "max"))
        return self.net.call(MINIMUM, self.net.call(MAXIMUM, x, least), most)

    def connected(self, x: Var, size: int) -> Var:
        """Return a row for each square, [squares, size]."""
        net, vision, own = self.net, self.vision, self.vision.hidden_size
        mean = net.call(MEAN, net.reshape(x, self.squares, vision.num_patches, own), axes=[1])
        row = net.scale(mean, own**0.5)
        if vision.standardizes:
            row = net.call(SUBTRACT, row, net.vector(f"{self.encoder}std_bias", own))
            row = net.call(MULTIPLY, row, net.vector(f"{self.encoder}std_scale", own))
        return net.linear(net.unit_norm(row, own, vision.norm_eps), f"{self.connector}embedding_projection", own, size, format=self.format)
