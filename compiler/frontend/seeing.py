"""The part of a vision model that looks: the program that turns crops of images into rows, which the step reads in place of the embeddings
of image tokens.

    see(pixels[n, side, side * 3], crop_ids[n * patches], starts[n + 1]) -> rows[n * rows of a crop, hidden size]

A crop is a square of bytes. The program scales and normalises them, multiplies each patch by a matrix, and applies the layers of the
encoder, in which a patch attends to all patches of its crop. The connector then joins the patches of each small square to one row, and
projects it. A row depends only on its own crop.
"""

from __future__ import annotations

import numpy as np

from compiler.frontend.config import ModelConfig, Vision
from compiler.frontend.layers.decoder import ACTIVATIONS
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, Var
from compiler.ir.types import tensor
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import CAST, DIVIDE, SUBTRACT
from compiler.ops.manipulate import PERMUTE_DIMS

ENTRY = "see"
ENCODER, CONNECTOR = "model.vision_model.", "model.connector."
COLOURS = 3
MOST_CROPS = 4  # crops that one call sees; more would only need a larger arena
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def add_seeing(net: Net, config: ModelConfig) -> None:
    """Add the program to the module of the builder."""
    vision = config.vision
    assert vision is not None
    n, i32 = DimVar("n", 1, MOST_CROPS), DType.I32
    pixels = Var("pixels", tensor((n, vision.crop_size, vision.crop_size * COLOURS), DType.U8))
    crop_ids = Var("crop_ids", tensor((n * vision.num_patches,), i32))
    starts = Var("starts", tensor((n + 1,), i32))
    with net.function(ENTRY, (pixels, crop_ids, starts)):
        net.builder.returns(_Seeing(net, vision, Dim.of(n), crop_ids, starts).rows(pixels, config.hidden_size))


class _Seeing:
    def __init__(self, net: Net, vision: Vision, n: Dim, crop_ids: Var, starts: Var) -> None:
        self.net, self.vision, self.n = net, vision, n
        self.patches = n * vision.num_patches
        self.crop_ids, self.starts = crop_ids, starts
        # Arithmetic, not reading weights, limits the speed, so weights of fewer bits would only cost precision.
        self.format = WeightFormat(32 if net.format.bits == 32 else 16)

    def rows(self, pixels: Var, size: int) -> Var:
        net, vision = self.net, self.vision
        x = self.embedded(pixels)
        for number in range(vision.num_layers):
            x = self.layer(x, f"{ENCODER}encoder.layers.{number}.")
        x = net.layer_norm(x, f"{ENCODER}post_layernorm", vision.hidden_size, vision.norm_eps)
        joined = self.shuffled(x)
        return net.linear(joined, f"{CONNECTOR}modality_projection.proj", vision.hidden_size * vision.shuffle**2, size, format=self.format)

    def embedded(self, pixels: Var) -> Var:
        """Return the patches with their positions, [patches, size]."""
        net, vision = self.net, self.vision
        edge, patch, size = vision.patches_per_edge, vision.patch_size, vision.hidden_size
        values = COLOURS * patch**2
        lines = net.reshape(pixels, self.n * edge, patch, edge, patch * COLOURS)
        patches = net.reshape(net.call(PERMUTE_DIMS, lines, axes=(0, 2, 1, 3)), self.patches, values)
        mean, deviation = (Constant(np.tile(np.array(of, np.float32), patch**2)) for of in (vision.cutting.mean, vision.cutting.deviation))
        x = net.call(DIVIDE, net.call(SUBTRACT, net.scale(net.call(CAST, patches, dtype="f32"), vision.cutting.rescale), mean), deviation)
        w = net.call(
            PERMUTE_DIMS, net.weight(f"{ENCODER}embeddings.patch_embedding.weight", size, COLOURS, patch, patch), axes=(0, 2, 3, 1)
        )
        bias = net.vector(f"{ENCODER}embeddings.patch_embedding.bias", size)
        x = net.product(x, net.reshape(w, size, values), bias, format=self.format)
        places = net.as_f32(net.weight(f"{ENCODER}embeddings.position_embedding.weight", vision.num_patches, size))
        placed = net.add(net.reshape(x, self.n, vision.num_patches, size), places)
        return net.reshape(placed, self.patches, size)

    def layer(self, x: Var, prefix: str) -> Var:
        net, vision = self.net, self.vision
        size, heads, eps = vision.hidden_size, vision.num_heads, vision.norm_eps
        h = net.layer_norm(x, f"{prefix}layer_norm1", size, eps)
        stacked = net.linear(h, [f"{prefix}{name}" for name in QKV], size, [size] * 3, bias=True, format=self.format)
        all_heads = net.reshape(stacked, self.patches, 3 * heads, size // heads)
        q, k, v = (net.slice(all_heads, 1, part * heads, (part + 1) * heads) for part in range(3))
        mixed = net.call(RAGGED_ATTENTION, q, k, v, self.crop_ids, self.starts, scale=(size // heads) ** -0.5)
        mixed = net.reshape(mixed, self.patches, size)
        x = net.add(x, net.linear(mixed, f"{prefix}self_attn.out_proj", size, size, bias=True, format=self.format))
        h = net.layer_norm(x, f"{prefix}layer_norm2", size, eps)
        wide = net.linear(h, f"{prefix}mlp.fc1", size, vision.intermediate_size, bias=True, format=self.format)
        wide = net.call(ACTIVATIONS[vision.activation], wide)
        return net.add(x, net.linear(wide, f"{prefix}mlp.fc2", vision.intermediate_size, size, bias=True, format=self.format))

    def shuffled(self, x: Var) -> Var:
        """Join the patches of each square of `shuffle` by `shuffle` patches, line by line: [rows, shuffle * shuffle * size]."""
        net, step, size = self.net, self.vision.shuffle, self.vision.hidden_size
        small = self.vision.patches_per_edge // step
        lines = net.reshape(x, self.n * small, step, small, step * size)
        return net.reshape(net.call(PERMUTE_DIMS, lines, axes=(0, 2, 1, 3)), self.n * self.vision.num_rows, step * step * size)
