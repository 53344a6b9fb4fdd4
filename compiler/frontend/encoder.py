"""The program of an encoder, composed of the layers of its family.

    encode(tokens[t], positions[t], text_ids[t], starts[n], segments[t]?) -> [n - 1, size]

If the model also embeds images, the module has a second program, `see` (`compiler/frontend/seeing.py`), which returns a vector per image.

The `t` tokens of `n - 1` texts are concatenated without padding (`compiler/ops/attention/ragged.py`). `starts` has the first token of each
text, and then `t`. An embedding model returns one vector per text, pooled and projected as in training but not normalised. A model with a
classification head returns the output of each class. Only models that classify pairs of texts and give the two texts different segments
have the parameter `segments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.family import EncoderFamily
from compiler.frontend.layers.encoder import EncoderLayer, Head, Stem, Texts, stem_norm
from compiler.frontend.layers.nn import DEFAULT_FORMAT, Net, WeightFormat, prefix_of
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import NO_FORMS, Form
from compiler.frontend.registry import encoder_family
from compiler.frontend.seeing import add_seeing
from compiler.frontend.sentence import Pooling
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ir.module import IRModule
from compiler.ir.types import tensor
from compiler.ops.attention.ragged import RAGGED_MAX, RAGGED_MEAN
from compiler.ops.elementwise import ADD, CAST, DIVIDE, GELU, MULTIPLY, RELU, SIGMOID, SILU, SQRT, SUBTRACT, TANH
from compiler.ops.embedding import EMBEDDING
from compiler.ops.manipulate import PERMUTE_DIMS, SLICE

ENTRY = "encode"
IN_F32 = WeightFormat(32)
DENSE_ACTIVATIONS = {"Identity": None, "Tanh": TANH, "ReLU": RELU, "GELU": GELU, "SiLU": SILU, "Sigmoid": SIGMOID}
UNSEEN = -1e30  # bias on the score of a key outside the window; finite, because -inf would give NaN in a block with only such keys
FURTHEST = 128  # distance beyond which MPNet assigns all positions to one bucket per direction
UNUSED = (
    "*pooler.dense.*",
    "*.position_ids",
    "*.token_type_ids",
    "cls.*",
    "lm_head.*",
    *("vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.*"),
    *("discriminator_predictions.*", "generator_predictions.*", "generator_lm_head.*"),
    *("head.*", "decoder.*"),
    *("logit_scale", "logit_bias"),
)  # heads for other tasks, tables of position numbers, and the scale and bias with which CLIP and SigLIP compare vectors


@dataclass(frozen=True, slots=True)
class EncodeBounds:
    """The largest numbers of tokens and of texts in one call, for which memory is planned."""

    max_tokens: int
    max_texts: int


def build_encode(
    config: ModelConfig,
    dtypes: Mapping[str, DType],
    bounds: EncodeBounds,
    format: WeightFormat = DEFAULT_FORMAT,
    *,
    forms: Mapping[str, Form] = NO_FORMS,
    numerics: Numerics = Numerics.AUTO,
) -> IRModule:
    """Build a module with the program `encode`, and with `see` if the model embeds images. `dtypes` has the type of each tensor of the
    checkpoint, and `forms` the forms of the matrices that the checkpoint stores as encoded numbers."""
    # Arithmetic, not reading weights, limits the speed of encoding whole texts. Floats of 16 bits would only cost precision.
    net = Net(dtypes, IN_F32 if format.bits == 16 else format, forms=forms, numerics=numerics)
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
    if config.vision is not None:
        add_seeing(net, config)
    return net.builder.finish()


@dataclass(slots=True)
class _Encode:
    """The program `encode` under construction. `prefix` begins the names of the weights."""

    net: Net
    config: ModelConfig
    family: EncoderFamily
    prefix: str
    texts: Texts
    t: DimVar
    n: DimVar

    def vectors(self) -> Var:
        """Return the vector of each text, or the outputs of its classes: [n - 1, size]."""
        c, net = self.config, self.net
        stem = Stem(net, c, self.texts, self.prefix)
        x = self.family.embed(stem)
        relative = self.relative_bias()
        for number in range(c.num_layers):
            bias = self.window_bias(number) or relative
            x = self.family.layer(EncoderLayer(net, c, self.texts, self.t, bias, f"{self.prefix}{self.family.layers}.{number}.", number), x)
        if self.family.last_norm is not None:
            x = stem_norm(stem, x, self.family.last_norm)
        if c.classes is None:
            pooled = self.pooled(x, c.embedding.pooling)
            return self.projected(pooled if self.family.join is None else self.family.join(stem, pooled))
        assert c.encoder is not None and self.family.head is not None
        return self.family.head(Head(net, c, self.prefix), self.pooled(x, c.encoder.class_pooling))

    def projected(self, x: Var) -> Var:
        """Apply the projections that follow the pooling. They are computed in f32, since they are small."""
        for dense in self.config.embedding.dense:
            x = self.net.linear(x, f"{dense.folder}.linear", dense.in_size, dense.size, bias=dense.bias, format=IN_F32)
            if (activation := DENSE_ACTIVATIONS[dense.activation]) is not None:
                x = self.net.call(activation, x)
        return x

    def relative_bias(self) -> tuple[Var, ...]:
        """Return MPNet's bias on attention scores by distance, which all layers share, [heads, 2 * FURTHEST + 1]; empty for other
        models."""
        net, c = self.net, self.config
        assert c.encoder is not None
        if not (num_buckets := c.encoder.relative_buckets):
            return ()
        table = net.weight(f"{self.prefix}encoder.relative_attention_bias.weight", num_buckets, c.num_heads)
        by_distance = net.call(EMBEDDING, table, Constant(distance_buckets(num_buckets, FURTHEST)))
        return (net.as_f32(net.call(PERMUTE_DIMS, by_distance, axes=(1, 0))),)

    def window_bias(self, number: int) -> tuple[Constant, ...]:
        """Return the bias on attention scores that keeps tokens, in layer `number`, from attending beyond their window or to later tokens.
        Return nothing if tokens attend to their whole text."""
        c = self.config
        assert c.encoder is not None
        if c.encoder.looks_back:
            return (Constant(np.tile(np.array([0, 0, UNSEEN], np.float32), (c.num_heads, 1))),)  # for the distances -1, 0 and 1
        reach = c.encoder.reaches[number] if c.encoder.reaches else None
        if reach is None:
            return ()
        seen = np.zeros((c.num_heads, 2 * reach + 3), np.float32)
        seen[:, [0, -1]] = UNSEEN
        return (Constant(seen),)

    def pooled(self, x: Var, pooling: Pooling) -> Var:
        """Return one vector per text."""
        net, starts, n = self.net, self.texts.starts, Dim.of(self.n)
        begins = net.call(SLICE, starts, axis=0, begin=0, end=n - 1)
        ends = net.call(SLICE, starts, axis=0, begin=1, end=n)
        counts = net.reshape(net.call(CAST, net.call(SUBTRACT, ends, begins), dtype="f32"), n - 1, 1)
        match pooling:
            case Pooling.MEAN:
                return net.call(RAGGED_MEAN, x, starts)
            case Pooling.CLS:
                return net.call(EMBEDDING, x, begins)
            case Pooling.LAST:
                return net.call(EMBEDDING, x, net.call(ADD, ends, ScalarValue(Dim.of(-1), "i32")))
            case Pooling.MAX:
                return net.call(RAGGED_MAX, x, starts)
            case Pooling.ROOT_MEAN:
                return net.call(MULTIPLY, net.call(RAGGED_MEAN, x, starts), net.call(SQRT, counts))
            case Pooling.WEIGHTED_MEAN:  # the mean of weight * vector, divided by the mean weight, (count + 1) / 2
                places = net.reshape(net.call(CAST, self.texts.positions, dtype="f32"), self.t, 1)
                weighted = net.call(MULTIPLY, x, net.add(places, ScalarValue(1.0, "f32")))
                half = net.scale(net.add(counts, ScalarValue(1.0, "f32")), 0.5)
                return net.call(DIVIDE, net.call(RAGGED_MEAN, weighted, starts), half)


def distance_buckets(num_buckets: int, furthest: int) -> NDArray[np.int32]:
    """Return the bucket of each distance `key - query` from -furthest to furthest. Each direction has half of the buckets. Half of a
    direction's buckets hold one small distance each; its other buckets hold ranges of growing width."""
    distance = np.arange(-furthest, furthest + 1)
    per_side = num_buckets // 2
    exact = per_side // 2
    far = np.maximum(np.abs(distance), 1).astype(np.float32)
    steps = np.log(far / np.float32(exact)) / np.float32(np.log(furthest / exact)) * np.float32(per_side - exact)
    wide = np.minimum(exact + steps.astype(np.int32), per_side - 1)
    within = np.where(np.abs(distance) < exact, np.abs(distance), wide)
    return (within + np.where(distance > 0, per_side, 0)).astype(np.int32)
