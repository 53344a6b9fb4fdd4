"""The part of a vision model that looks: the program that turns crops of images into rows, which the step reads in place of the embeddings
of image tokens.

    see(pixels[n, side, side * 3], crop_ids[n * places], starts[n + 1]) -> rows[n * rows of a crop, hidden size]

A crop is a square of bytes. The program scales and normalises them, multiplies each patch by a matrix, and applies the layers of the
encoder, in which a place, that is a patch or the class token, attends to all places of its crop. The connector then turns the patches of
each small square into one row. A row depends only on its own crop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net, WeightFormat, prefix_of
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, ShapeValue, Var
from compiler.ir.types import tensor
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import CAST, DIVIDE, MULTIPLY, SUBTRACT
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, PERMUTE_DIMS
from compiler.ops.reduce import MEAN

ENTRY = "see"
ENCODERS = ("model.vision_model.", "vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower.")
CONNECTORS = ("model.connector.", "multi_modal_projector.", "model.multi_modal_projector.")
COLOURS = 3
MOST_PATCHES, MOST_CROPS = 4096, 4  # patches and crops that one call sees, but at least one crop; more would only need a larger arena
CONNECTOR_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Names:
    """The names of weights of an encoder."""

    patch: str = "embeddings.patch_embedding"
    class_token: str = "embeddings.class_embedding"
    positions: str = "embeddings.position_embedding.weight"
    layers: str = "encoder.layers"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    out: str = "out_proj"
    last_norm: str = "post_layernorm"
    scales: tuple[str, str] | None = None  # vectors that multiply the results of the branches of a layer


NAMES = {
    Tower.SIGLIP: Names(),
    Tower.CLIP: Names(),
    Tower.INTERN: Names(
        patch="embeddings.patch_embeddings.projection",
        class_token="embeddings.cls_token",
        positions="embeddings.position_embeddings",
        layers="encoder.layer",
        norms=("layernorm_before", "layernorm_after"),
        attention="attention",
        out="projection_layer",
        last_norm="layernorm",
        scales=("lambda_1", "lambda_2"),
    ),
}


def most_crops(vision: Vision) -> int:
    """Return how many crops one call of the program sees."""
    return max(1, min(MOST_CROPS, MOST_PATCHES // vision.num_patches))


def add_seeing(net: Net, config: ModelConfig) -> None:
    """Add the program to the module of the builder."""
    vision = config.vision
    assert vision is not None
    n, i32 = DimVar("n", 1, most_crops(vision)), DType.I32
    pixels = Var("pixels", tensor((n, vision.crop_size, vision.crop_size * COLOURS), DType.U8))
    crop_ids = Var("crop_ids", tensor((n * vision.num_places,), i32))
    starts = Var("starts", tensor((n + 1,), i32))
    with net.function(ENTRY, (pixels, crop_ids, starts)):
        net.builder.returns(_Seeing(net, vision, Dim.of(n), crop_ids, starts).rows(pixels, config.hidden_size))


class _Seeing:
    def __init__(self, net: Net, vision: Vision, n: Dim, crop_ids: Var, starts: Var) -> None:
        self.net, self.vision, self.n, self.names = net, vision, n, NAMES[vision.tower]
        self.places = n * vision.num_places
        self.crop_ids, self.starts = crop_ids, starts
        self.encoder, self.connector = (
            next(filter(None, (prefix_of(net.dtypes, prefix) for prefix in known)), known[0]) for known in (ENCODERS, CONNECTORS)
        )
        # Arithmetic, not reading weights, limits the speed, so weights of fewer bits would only cost precision.
        self.format = WeightFormat(32 if net.format.bits == 32 else 16)

    def rows(self, pixels: Var, size: int) -> Var:
        net, vision = self.net, self.vision
        x = self.embedded(pixels)
        for number in range(vision.num_layers):
            x = self.layer(x, f"{self.encoder}{self.names.layers}.{number}.")
        if vision.last_norm:
            x = net.layer_norm(x, f"{self.encoder}{self.names.last_norm}", vision.hidden_size, vision.norm_eps)
        return self.connected(self.without_class(x), size)

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
        mean, deviation = (Constant(np.tile(np.array(of, np.float32), patch**2)) for of in (vision.cutting.mean, vision.cutting.deviation))
        x = net.call(DIVIDE, net.call(SUBTRACT, net.scale(net.call(CAST, patches, dtype="f32"), vision.cutting.rescale), mean), deviation)
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
        """Return `count` vectors of places, [1, count, size]. The checkpoint has them with as many axes as its program needs."""
        net, size, full = self.net, self.vision.hidden_size, f"{self.encoder}{name}"
        if self.vision.tower is Tower.INTERN:
            return net.weight(full, 1, count, size)
        return net.reshape(net.weight(full, size) if name == self.names.class_token else net.weight(full, count, size), 1, count, size)

    def layer(self, x: Var, prefix: str) -> Var:
        net, vision, names = self.net, self.vision, self.names
        size, heads, eps = vision.hidden_size, vision.num_heads, vision.norm_eps
        h = net.layer_norm(x, f"{prefix}{names.norms[0]}", size, eps)
        qkv = [f"{prefix}{names.attention}.{part}_proj" for part in "qkv"]
        stacked = net.linear(h, qkv, size, [size] * 3, bias=vision.qkv_bias, format=self.format)
        all_heads = net.reshape(stacked, self.places, 3 * heads, size // heads)
        q, k, v = (net.slice(all_heads, 1, part * heads, (part + 1) * heads) for part in range(3))
        mixed = net.call(RAGGED_ATTENTION, q, k, v, self.crop_ids, self.starts, scale=(size // heads) ** -0.5)
        mixed = net.reshape(mixed, self.places, size)
        x = self.added(x, net.linear(mixed, f"{prefix}{names.attention}.{names.out}", size, size, bias=True, format=self.format), prefix, 0)
        h = net.layer_norm(x, f"{prefix}{names.norms[1]}", size, eps)
        wide = net.linear(h, f"{prefix}mlp.fc1", size, vision.intermediate_size, bias=True, format=self.format)
        wide = plain_activation(net, vision.activation, wide)
        return self.added(x, net.linear(wide, f"{prefix}mlp.fc2", vision.intermediate_size, size, bias=True, format=self.format), prefix, 1)

    def added(self, x: Var, branch: Var, prefix: str, number: int) -> Var:
        """Add the result of a branch of a layer."""
        if self.names.scales is not None:
            scale = self.net.vector(f"{prefix}{self.names.scales[number]}", self.vision.hidden_size)
            branch = self.net.call(MULTIPLY, branch, scale)
        return self.net.add(x, branch)

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
            case _:
                assert_never(vision.connector)

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
