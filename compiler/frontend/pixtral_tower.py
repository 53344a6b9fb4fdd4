"""Emit the encoder of Pixtral, with the connector of Mistral 3 or of LLaVA."""

from __future__ import annotations

import numpy as np

from compiler.frontend.any_size import LikeDecoders
from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.rope import Rope
from compiler.ir.graph.atoms import Constant, Var
from compiler.ops.embedding import ROPE_ANGLES
from compiler.ops.index import TAKE
from compiler.ops.manipulate import PERMUTE_DIMS


class Pixtral(LikeDecoders):
    """Pixtral's encoder. RoPE rotates the first half of a head's pairs by the row, at every other frequency, and the second half by the
    column, at the frequencies between these."""

    bias = False

    def rows(self, patches: Var, points: Var, config: ModelConfig) -> Var:
        self.angles = self.rotations(points)
        x = self.norm(self.embedded(patches), f"{self.encoder}ln_pre")
        for number in range(self.vision.num_layers):
            x = self.layer(x, number)
        return self.connected(x, config)

    def rotations(self, points: Var) -> tuple[Var, Var]:
        """Return RoPE's cosines and sines, each [places, pairs]."""
        net, head = self.net, self.vision.hidden_size // self.vision.num_heads
        frequencies, _ = Rope(self.vision.theta, head).frequencies(1)
        both = net.call(ROPE_ANGLES, points, Constant(frequencies))  # [squares, patches, 2, pairs]
        pairs = np.arange(head // 2, dtype=np.int32)
        columns = Constant(np.concatenate([pairs[0::2], head // 2 + pairs[1::2]]))
        cosines, sines = (net.call(TAKE, net.reshape(net.field(both, part), self.places, head), columns, axis=1) for part in range(2))
        return cosines, sines

    def connected(self, x: Var, config: ModelConfig) -> Var:
        """Return a row for each square, [squares, size]."""
        net, vision, own = self.net, self.vision, self.vision.hidden_size
        assert vision.connector_activation is not None
        if vision.connector_norm:
            x = self.united(net.rms_norm(x, f"{self.connector}norm", own, config.norm_eps))
        wide = plain_activation(net, vision.connector_activation, self.projected(x, "linear_1", own, config.hidden_size))
        return self.projected(wide, "linear_2", config.hidden_size, config.hidden_size)

    def projected(self, x: Var, name: str, in_size: int, size: int) -> Var:
        return self.net.linear(x, f"{self.connector}{name}", in_size, size, bias=self.vision.connector_bias, format=self.format)

    def united(self, x: Var) -> Var:
        """Return a vector for each square, [squares, hidden size of the encoder]. The checkpoint orders the inputs of its matrix by
        element, then by patch. They are reordered like the elements of a joined square: by patch, then by element."""
        net, own, count = self.net, self.vision.hidden_size, self.vision.num_patches
        w = net.reshape(net.weight(f"{self.connector}patch_merger.merging_layer.weight", own, own * count), own, own, count)
        matrix = net.reshape(net.call(PERMUTE_DIMS, w, axes=(0, 2, 1)), own, count * own)
        return net.product(self.joined(x), matrix, format=self.format)
