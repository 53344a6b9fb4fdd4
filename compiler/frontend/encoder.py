"""The encoder of embedding models, composed of the layers of its family.

    encode(tokens[t], positions[t], text_ids[t], starts[n], segments[t]?) -> [n - 1, size]

`t` tokens of `n - 1` texts, one behind the other without padding (`ops.ragged`). An embedding model gives one vector per text, pooled as it
was trained and not normalised; a model with a classification head gives the number of each class. `segments` are there where such a model
tells the two texts of a pair apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.family import EncoderFamily
from compiler.frontend.layers.encoder import EncoderLayer, Head, Texts
from compiler.frontend.layers.nn import DEFAULT_FORMAT, Net, WeightFormat, prefix_of
from compiler.frontend.registry import encoder_family
from compiler.frontend.sentence import Pooling
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, Var
from compiler.ir.module import IRModule
from compiler.ir.types import tensor
from compiler.ops.attention.ragged import RAGGED_MEAN
from compiler.ops.elementwise import ADD
from compiler.ops.embedding import EMBEDDING
from compiler.ops.manipulate import PERMUTE_DIMS, SLICE

ENTRY = "encode"
AS_STORED = WeightFormat(32)
FURTHEST = 128  # beyond this distance, all positions of MPNet share a bucket
UNUSED = (
    "*pooler.dense.*",
    "*.position_ids",
    "*.token_type_ids",
    "cls.*",
    "lm_head.*",
)  # heads for other tasks, and a table of what is counted


@dataclass(frozen=True, slots=True)
class EncodeBounds:
    max_tokens: int
    max_texts: int


def build_encode(
    config: ModelConfig,
    dtypes: Mapping[str, DType],
    bounds: EncodeBounds,
    format: WeightFormat = DEFAULT_FORMAT,
) -> IRModule:
    # Whole texts are bound by arithmetic, not by reading weights: fewer bits would only cost precision.
    net = Net(dtypes, AS_STORED if format.bits == 16 else format)
    t, n = DimVar("t", 0, bounds.max_tokens), DimVar("n", 1, bounds.max_texts + 1)
    i32 = DType.I32
    batch = Texts(
        tokens=Var("tokens", tensor((t,), i32)),
        positions=Var("positions", tensor((t,), i32)),
        text_ids=Var("text_ids", tensor((t,), i32)),
        starts=Var("starts", tensor((n,), i32)),
        segments=Var("segments", tensor((t,), i32)) if config.tells_pairs_apart else None,
    )
    with net.function(ENTRY, batch.params):
        family = encoder_family(config.family)
        net.builder.returns(_Encode(net, config, family, prefix_of(dtypes, family.prefix), batch, t, n).vectors())
    return net.builder.finish()


@dataclass(slots=True)
class _Encode:
    net: Net
    config: ModelConfig
    family: EncoderFamily
    prefix: str
    texts: Texts
    t: DimVar
    n: DimVar

    def vectors(self) -> Var:
        x = self.embedded()
        bias = self.relative_bias()
        for number in range(self.config.num_layers):
            at = EncoderLayer(self.net, self.config, self.texts, self.t, bias, f"{self.prefix}encoder.layer.{number}.")
            x = self.family.layer(at, x)
        if self.config.classes is None:
            return self.pooled(x)
        return self.family.head(Head(self.net, self.config, self.prefix), self.first_tokens(x))

    def embedded(self) -> Var:
        net, c, texts = self.net, self.config, self.texts
        assert c.encoder is not None
        at = f"{self.prefix}embeddings."
        x = net.embedding(f"{at}word_embeddings", texts.tokens, c.vocab_size, c.hidden_size)
        places: Atom = texts.positions
        if c.encoder.position_offset:
            places = net.call(ADD, places, ScalarValue(Dim.of(c.encoder.position_offset), "i32"))
        x = net.add(x, net.embedding(f"{at}position_embeddings", places, c.encoder.num_positions, c.hidden_size))
        if c.encoder.num_segments:
            x = net.add(x, self.segments(f"{at}token_type_embeddings"))
        return net.layer_norm(x, f"{at}LayerNorm", c.hidden_size, c.norm_eps)

    def segments(self, name: str) -> Var:
        """The vector of each token's segment: of the first alone, unless pairs are told apart."""
        net, c = self.net, self.config
        assert c.encoder is not None
        if self.texts.segments is not None:
            return net.embedding(name, self.texts.segments, c.encoder.num_segments, c.hidden_size)
        return net.as_f32(net.slice(net.weight(f"{name}.weight", c.encoder.num_segments, c.hidden_size), 0, 0, 1))

    def relative_bias(self) -> tuple[Var, ...]:
        """MPNet's: a number per head and bucket of distances, the same in all layers."""
        net, c = self.net, self.config
        assert c.encoder is not None
        if not (num_buckets := c.encoder.relative_buckets):
            return ()
        table = net.weight(f"{self.prefix}encoder.relative_attention_bias.weight", num_buckets, c.num_heads)
        by_distance = net.call(EMBEDDING, table, Constant(distance_buckets(num_buckets, FURTHEST)))
        return (net.as_f32(net.call(PERMUTE_DIMS, by_distance, axes=(1, 0))),)

    def first_tokens(self, x: Var) -> Var:
        begins = self.net.call(SLICE, self.texts.starts, axis=0, begin=0, end=Dim.of(self.n) - 1)
        return self.net.call(EMBEDDING, x, begins)

    def pooled(self, x: Var) -> Var:
        net, starts, n = self.net, self.texts.starts, Dim.of(self.n)
        match self.config.embedding.pooling:
            case Pooling.MEAN:
                return net.call(RAGGED_MEAN, x, starts)
            case Pooling.CLS:
                return self.first_tokens(x)
            case Pooling.LAST:
                ends = net.call(SLICE, starts, axis=0, begin=1, end=n)
                return net.call(EMBEDDING, x, net.call(ADD, ends, ScalarValue(Dim.of(-1), "i32")))


def distance_buckets(num_buckets: int, furthest: int) -> NDArray[np.int32]:
    """The bucket of each distance `key - query` from -furthest to furthest: half of the buckets for each direction, and of these half
    for the small distances one by one, the others ever wider."""
    distance = np.arange(-furthest, furthest + 1)
    per_side = num_buckets // 2
    exact = per_side // 2
    far = np.maximum(np.abs(distance), 1).astype(np.float32)
    steps = np.log(far / np.float32(exact)) / np.float32(np.log(furthest / exact)) * np.float32(per_side - exact)
    wide = np.minimum(exact + steps.astype(np.int32), per_side - 1)
    within = np.where(np.abs(distance) < exact, np.abs(distance), wide)
    return (within + np.where(distance > 0, per_side, 0)).astype(np.int32)
