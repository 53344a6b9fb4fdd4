"""The layers that all encoders of images have in common, and the names of their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net, WeightFormat, prefix_of
from compiler.frontend.vision import Tower, Vision
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Constant, ShapeValue, Var
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.elementwise import CAST, DIVIDE, MULTIPLY, SUBTRACT
from compiler.ops.embedding import ROPE
from compiler.ops.manipulate import BROADCAST_TO

ENCODERS = (
    *("model.vision_model.", "vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower."),
    *("model.visual.", "visual.", "vision_model."),
)
CONNECTORS = (
    *("model.connector.", "multi_modal_projector.", "model.multi_modal_projector.", "model.visual.merger.", "visual.merger."),
    "model.embed_vision.",
)
PROJECTION = "visual_projection"  # CLIP's projection of images to the space that their vectors share with those of texts
COLOURS = 3


@dataclass(frozen=True, slots=True)
class Names:
    """The names of weights and modules of an encoder. `norms`, `attention`, `feed` and `scales` are inside a layer, `qkv` and `out` inside
    `attention`, and `perceptron` inside `feed`; all others are inside the encoder."""

    patch: str = "embeddings.patch_embedding"
    class_token: str = "embeddings.class_embedding"
    positions: str = "embeddings.position_embedding.weight"
    layers: str = "encoder.layers"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: a stacked projection
    out: str = "out_proj"
    feed: str = "mlp"
    perceptron: tuple[str, str] = ("fc1", "fc2")
    first_norm: str = ""  # norm before the layers; empty: there is none
    last_norm: str = "post_layernorm"
    scales: tuple[str, str] | None = None  # vectors that multiply the results of attention and of the MLP


QWEN = Names(patch="patch_embed.proj", layers="blocks", norms=("norm1", "norm2"), attention="attn", qkv=("qkv",), out="proj")
NAMES = {
    Tower.SIGLIP: Names(),
    Tower.CLIP: Names(first_norm="pre_layrnorm"),
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
    Tower.QWEN2: QWEN,
    Tower.QWEN2_5: QWEN,
    Tower.OMNI: replace(QWEN, qkv=("q", "k", "v")),
    Tower.PIXTRAL: Names(
        patch="patch_conv",
        layers="transformer.layers",
        norms=("attention_norm", "ffn_norm"),
        attention="attention",
        out="o_proj",
        feed="feed_forward",
    ),
    Tower.SIGLIP2: Names(),
    Tower.GLM4V: replace(QWEN, positions="embeddings.position_embedding.weight"),
    Tower.LLAMA4: Names(
        patch="patch_embedding.linear",
        class_token="class_embedding",
        positions="positional_embedding_vlm",
        layers="model.layers",
        norms=("input_layernorm", "post_attention_layernorm"),
        out="o_proj",
        first_norm="layernorm_pre",
        last_norm="layernorm_post",
    ),
    Tower.GEMMA4: Names(patch="patch_embedder.input_proj", positions="patch_embedder.position_embedding_table"),
    Tower.QWEN3: replace(QWEN, positions="pos_embed.weight", perceptron=("linear_fc1", "linear_fc2")),
}


def sees(name: str) -> bool:
    """Return whether a tensor belongs to an encoder of images or to its connector."""
    return name.startswith((*ENCODERS, *CONNECTORS, PROJECTION))


def normalised(net: Net, vision: Vision, patches: Var) -> Var:
    """Return the bytes of patches as numbers, scaled and normalised by colour: [patches, values]."""
    mean, deviation = (
        Constant(np.tile(np.array(of, np.float32), vision.patch_size**2)) for of in (vision.cutting.mean, vision.cutting.deviation)
    )
    return net.call(DIVIDE, net.call(SUBTRACT, net.scale(net.call(CAST, patches, dtype="f32"), vision.cutting.rescale), mean), deviation)


class TowerLayers(ABC):
    """Builds the layers of an encoder for `places` vectors: a place is a patch or a class token. A place attends to all places of its crop,
    unless a subclass defines other `groups`. `crop_ids` has the index of each place's crop, and `starts` the first place of each crop,
    followed by the number of places."""

    interleaved = False  # whether RoPE rotates adjacent elements of queries and keys as pairs
    bias = True  # whether matrices have biases, except those of queries, keys and values: see `Vision.qkv_bias`

    def __init__(self, net: Net, vision: Vision, places: Dim, crop_ids: Var, starts: Var) -> None:
        self.net, self.vision, self.names = net, vision, NAMES[vision.tower]
        self.places, self.crop_ids, self.starts = places, crop_ids, starts
        self.encoder, self.connector = (
            next(filter(None, (prefix_of(net.dtypes, prefix) for prefix in known)), known[0]) for known in (ENCODERS, CONNECTORS)
        )
        # Weights of fewer bits would cost precision and gain nothing, since the speed is limited by arithmetic, not by reading weights.
        self.format = WeightFormat(32 if net.format.bits == 32 else 16)
        self.angles: tuple[Var, Var] | None = None  # RoPE's cosines and sines, [places, pairs]; None: no RoPE

    def layer(self, x: Var, number: int) -> Var:
        """Return the vectors of places after a layer: attention within `groups`, then an MLP, each after a norm."""
        net, vision, names = self.net, self.vision, self.names
        size, heads, prefix = vision.hidden_size, vision.num_heads, f"{self.encoder}{names.layers}.{number}."
        h = self.norm(x, f"{prefix}{names.norms[0]}")
        qkv = [f"{prefix}{names.attention}.{part}" for part in names.qkv]
        stacked = net.linear(h, qkv, size, [3 * size // len(qkv)] * len(qkv), bias=vision.qkv_bias, format=self.format)
        all_heads = net.reshape(stacked, self.places, 3 * heads, size // heads)
        q, k, v = (net.slice(all_heads, 1, part * heads, (part + 1) * heads) for part in range(3))
        if self.angles is not None:
            q, k = (net.call(ROPE, part, *self.angles, interleaved=self.interleaved) for part in (q, k))
        mixed = net.call(RAGGED_ATTENTION, q, k, v, *self.groups(number), scale=(size // heads) ** -0.5)
        mixed = net.reshape(mixed, self.places, size)
        x = self.added(x, self.linear(mixed, f"{prefix}{names.attention}.{names.out}", size, size), prefix, 0)
        return self.added(x, self.fed(self.norm(x, f"{prefix}{names.norms[1]}"), f"{prefix}{names.feed}."), prefix, 1)

    def groups(self, number: int) -> tuple[Var, Var]:
        """Return the groups within which places attend to each other in a layer: the index of each place's group, and the first place of
        each group, followed by the number of places."""
        return self.crop_ids, self.starts

    def norm(self, x: Var, name: str) -> Var:
        return self.net.layer_norm(x, name, self.vision.hidden_size, self.vision.norm_eps)

    def fed(self, h: Var, prefix: str) -> Var:
        """Return the result of the MLP of a layer."""
        net, vision, wide = self.net, self.vision, self.vision.intermediate_size
        up = plain_activation(net, vision.activation, self.linear(h, f"{prefix}{self.names.perceptron[0]}", vision.hidden_size, wide))
        return self.linear(up, f"{prefix}{self.names.perceptron[1]}", wide, vision.hidden_size)

    def probed(self, x: Var) -> Var:
        """Attend to each crop with a learned query (the probe), and apply an MLP to the result: [crops, size]. All places of a crop have
        this query and get the same result, so take the result of one place."""
        net, own, name = self.net, self.vision.hidden_size, f"{self.encoder}head."
        heads, size = self.vision.num_heads, own // self.vision.num_heads
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
        h = self.linear(self.one_of_each(net.reshape(mixed, self.places, own)), f"{name}attention.out_proj", own, own)
        return net.add(h, self.fed(self.norm(h, f"{name}layernorm"), f"{name}mlp."))

    @abstractmethod
    def one_of_each(self, x: Var) -> Var:
        """Return the vector of one place of each crop, [crops, size]."""

    def linear(self, x: Var, name: str, in_size: int, size: int) -> Var:
        return self.net.linear(x, name, in_size, size, bias=self.bias, format=self.format)

    def added(self, x: Var, branch: Var, prefix: str, number: int) -> Var:
        """Add to `x` the result of attention (`number` 0) or of the MLP (1), times the checkpoint's scale if there is one."""
        if self.names.scales is not None:
            scale = self.net.vector(f"{prefix}{self.names.scales[number]}", self.vision.hidden_size)
            branch = self.net.call(MULTIPLY, branch, scale)
        return self.net.add(x, branch)
