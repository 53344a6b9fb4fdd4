"""Gemma 3n: several residual streams (AltUp), a learned residual connection around attention (LAuReL), per-layer embeddings, and, in some
layers, MLPs that keep only large activations. A layer predicts all streams, computes the first stream, and corrects all streams. The last
layers read the keys and values of earlier layers. The encoders of images and audio are not supported."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import reduce
from statistics import NormalDist
from typing import Any

import numpy as np

from compiler.frontend.config import AltUp, LayerInputs, ModelConfig, read_decoder, read_softcap, read_windows, text_fields
from compiler.frontend.families.gemma2 import GGUF_LAYER_NAMES, NORMS
from compiler.frontend.families.gemma3_text import with_ropes
from compiler.frontend.families.gemma4 import attend_shared, join_inputs, layer_inputs, sharing
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import are_integers
from compiler.frontend.layers.decoder import DOWN, GATE_UP, Layer, Step, activated, gated_mlp, norm
from compiler.frontend.layers.mixture import ROUTER_FORMAT
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ops.elementwise import DIVIDE, MAXIMUM, MULTIPLY, RELU, SQRT, SUBTRACT, TANH
from compiler.ops.manipulate import CONCAT
from compiler.ops.reduce import MEAN, SUM

MULTIMODAL = "gemma3n"
PERIOD = 5  # layers per period; the last layer of a period has no window, unless layer_types says otherwise
# By default, `activation_sparsity_pattern` is SPARSITY in the first NUM_SPARSE layers and 0 in all other layers.
# If a model has at most NUM_SPARSE layers, the default is 0 in all layers.
NUM_SPARSE, SPARSITY = 10, 0.95
LEAST_SQUARE = 1e-5  # lower bound of the mean square by whose root the elements of a stream are divided


def read(fields: Fields) -> ModelConfig:
    if fields.text("model_type") == MULTIMODAL:
        fields = text_fields(fields, {"model_type": f"{MULTIMODAL}_text"})
    fields.fill(num_attention_heads=8, num_key_value_heads=2, head_dim=256, hidden_activation="gelu_pytorch_tanh")
    fields.fill(max_position_embeddings=32_768, tie_word_embeddings=True, num_kv_shared_layers=15)
    fields.skip("altup_coef_clip", "altup_lr_multiplier")  # for training
    fields.skip("query_pre_attn_scalar")  # transformers does not read this field: norms of queries replace the scale
    sizes = _read_sizes(fields)
    config = read_decoder(fields, act="hidden_activation", intermediate_size=max(sizes), bias="attention_bias")
    config = replace(
        with_ropes(fields, config),
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        windows=read_windows(fields, fields.integer("sliding_window", 512), lambda layer: (layer + 1) % PERIOD != 0),
        logit_softcap=read_softcap(fields, "final_logit_softcapping", 30.0),
        layer_inputs=LayerInputs(fields.integer("hidden_size_per_layer_input", 256), fields.integer("vocab_size_per_layer_input", 262_144)),
        altup=_read_altup(fields),
        intermediate_sizes=sizes,
        sparsities=_read_sparsities(fields, config.num_layers),
    )
    return sharing(fields, config)


def _read_sizes(fields: Fields) -> tuple[int, ...]:
    """Return the intermediate size of each layer. Files state one number for all layers, or a list with one number per layer. If the field
    is absent, the size is 16,384 in all layers. Raise ConfigError for other values."""
    num_layers, given = fields.integer("num_hidden_layers", maximum=10_000), fields.raw("intermediate_size", 16_384)
    sizes = given if isinstance(given, list) else [given] * num_layers
    if len(sizes) != num_layers or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
        raise fields.error("intermediate_size", f"a positive integer or a list of {num_layers} positive integers")
    return tuple(sizes)


def _read_altup(fields: Fields) -> AltUp:
    fields.require(altup_active_idx=0, altup_correct_scale=True)
    return AltUp(fields.integer("altup_num_inputs", 4, minimum=2, maximum=64), fields.integer("laurel_rank", 64))


def _read_sparsities(fields: Fields, num_layers: int) -> tuple[float, ...]:
    """Return the sparsity of each layer's MLP. Raise ConfigError if the field is no list with one number per layer, each at least 0 and
    less than 1."""
    num_sparse = NUM_SPARSE if num_layers > NUM_SPARSE else 0
    given = fields.raw("activation_sparsity_pattern", [SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse))
    if not isinstance(given, list) or len(given) != num_layers or not all(type(s) in (int, float) and 0 <= s < 1 for s in given):
        raise fields.error("activation_sparsity_pattern", f"a list of {num_layers} numbers of at least 0 and less than 1")
    return tuple(map(float, given))


# --- before and after the layers ---------------------------------------------------------------------------------------


def widen(step: Step, x: Var) -> Var:
    """Return the streams side by side, [tokens, streams * size]. The first stream is the token embeddings. The other streams are
    projections of the token embeddings, scaled to the root mean square of the first stream."""
    net, size = step.net, step.config.hidden_size
    names = [f"{step.prefix}altup_projections.{number}" for number in range(_num_streams(step) - 1)]
    return net.call(CONCAT, x, *(_as_large(step, net.linear(x, name, size, size), x) for name in names), axis=1)


def narrow(step: Step, x: Var) -> Var:
    """Return the mean of the first stream and of projections of the other streams, each scaled to the root mean square of the first
    stream."""
    net, size, count = step.net, step.config.hidden_size, _num_streams(step)
    first, *others = (net.slice(x, 1, number * size, (number + 1) * size) for number in range(count))
    names = [f"{step.prefix}altup_unembed_projections.{number}" for number in range(count - 1)]
    made = [_as_large(step, net.linear(other, name, size, size), first) for name, other in zip(names, others, strict=True)]
    return net.scale(reduce(net.add, made, first), 1 / count)


def _num_streams(step: Step) -> int:
    assert step.config.altup is not None, step.config
    return step.config.altup.num_streams


def _as_large(step: Step, x: Var, model: Var) -> Var:
    """Scale each row of `x` to the root mean square of the same row of `model`. A row of `x` whose mean square is below LEAST_SQUARE gets a
    smaller root mean square than the row of `model`."""
    net = step.net
    own = net.call(MAXIMUM, _mean_square(step, x), ScalarValue(LEAST_SQUARE, "f32"))
    return net.call(DIVIDE, net.call(MULTIPLY, x, net.call(SQRT, _mean_square(step, model))), net.call(SQRT, own))


def _mean_square(step: Step, x: Var) -> Var:
    return step.net.call(MEAN, step.net.call(MULTIPLY, x, x), axes=[1], keepdims=True)


# --- layers --------------------------------------------------------------------------------------------------------------


def layer(at: Layer, x: Var) -> Var:
    """Predict all streams, compute the first stream, and correct all streams. Then compute a vector from the corrected first stream and the
    layer's per-layer embedding, and add it to all streams except the first."""
    net, c, t, count = at.step.net, at.step.config, at.step.t, _num_streams(at.step)
    predicted = _predict(at, net.reshape(x, t, count, c.hidden_size))
    first = _first(at, predicted)
    corrected = _correct(at, predicted, first, _compute(at, first))
    assert at.step.layer_inputs is not None, c
    scaled = net.call(MULTIPLY, _first(at, corrected), net.vector(at.name("altup.correct_output_scale"), c.hidden_size))
    change = norm(at, join_inputs(at, scaled, at.step.layer_inputs), "post_per_layer_input_norm")
    others = net.add(net.slice(corrected, 1, 1, count), net.reshape(change, t, 1, c.hidden_size))
    return net.reshape(net.call(CONCAT, net.slice(corrected, 1, 0, 1), others, axis=1), t, count * c.hidden_size)


def _first(at: Layer, streams: Var) -> Var:
    """Return the first of `streams[tokens, streams, size]`: [tokens, size]."""
    return at.step.net.reshape(at.step.net.slice(streams, 1, 0, 1), at.step.t, at.step.config.hidden_size)


def _predict(at: Layer, streams: Var) -> Var:
    """Return each of `streams[tokens, streams, size]` plus a weighted sum of all streams. The weights are computed from the first
    stream."""
    net, c, t, count = at.step.net, at.step.config, at.step.t, _num_streams(at.step)
    factors = net.linear(_modes(at, _first(at, streams)), at.name("altup.prediction_coefs"), count, count * count, format=ROUTER_FORMAT)
    each = net.call(MULTIPLY, net.reshape(streams, t, 1, count, c.hidden_size), net.reshape(factors, t, count, count, 1))
    return net.add(net.call(SUM, each, axes=[2]), streams)


def _correct(at: Layer, predicted: Var, first: Var, computed: Var) -> Var:
    """Return each predicted stream plus the error of the first prediction (`computed` - `first`) times a factor, which is computed from
    `computed` for each stream and token."""
    net, c, t, count = at.step.net, at.step.config, at.step.t, _num_streams(at.step)
    factors = net.linear(_modes(at, computed), at.name("altup.correction_coefs"), count, count, format=ROUTER_FORMAT)
    shares = net.reshape(net.add(factors, ScalarValue(1.0, "f32")), t, count, 1)
    error = net.reshape(net.call(SUBTRACT, computed, first), t, 1, c.hidden_size)
    return net.add(net.call(MULTIPLY, error, shares), predicted)


def _modes(at: Layer, x: Var) -> Var:
    """Return the numbers from which the factors and weights of streams are computed, [tokens, streams]."""
    net, size = at.step.net, at.step.config.hidden_size
    read = net.scale(norm(at, x, "altup.router_norm"), 1 / size)
    return net.call(TANH, net.linear(read, at.name("altup.modality_router"), size, _num_streams(at.step), format=ROUTER_FORMAT))


def _compute(at: Layer, x: Var) -> Var:
    """Return the first stream after attention, the learned residual connection and the MLP. `x` is the predicted first stream."""
    net = at.step.net
    h = norm(at, x, NORMS[0])
    attended = net.add(x, norm(at, attend_shared(at, h), NORMS[1]))
    x = net.scale(net.add(attended, _laurel(at, h)), 0.5**0.5)
    return net.add(x, norm(at, _feed(at, norm(at, x, NORMS[2])), NORMS[3]))


def _laurel(at: Layer, h: Var) -> Var:
    """Return the learned residual connection: `h` plus a normalised product of `h` with a matrix of low rank."""
    net, c = at.step.net, at.step.config
    assert c.altup is not None, c
    rank = c.altup.laurel_rank
    narrowed = net.linear(h, at.name("laurel.linear_left"), c.hidden_size, rank)
    return net.add(h, norm(at, net.linear(narrowed, at.name("laurel.linear_right"), rank, c.hidden_size), "laurel.post_laurel_norm"))


def _feed(at: Layer, h: Var) -> Var:
    """Apply the MLP. In a sparse layer, a quantile is subtracted from the gate's elements before the activation, and negative differences
    become 0. The quantile, at the layer's sparsity, is that of a normal distribution with the mean and the standard deviation of the
    token's gate."""
    net, c, size = at.step.net, at.step.config, at.step.config.intermediate_size_of(at.number)
    sparsity = c.sparsities[at.number]
    if not sparsity:
        return gated_mlp(at, h)
    gate, up = (net.linear(h, at.name(name), c.hidden_size, size) for name in GATE_UP)
    mean = net.call(MEAN, gate, axes=[1], keepdims=True)
    deviation = net.call(SQRT, _mean_square(at.step, net.call(SUBTRACT, gate, mean)))
    quantile = net.add(mean, net.scale(deviation, NormalDist().inv_cdf(sparsity)))
    kept = net.call(RELU, net.call(SUBTRACT, gate, quantile))
    return net.linear(net.call(MULTIPLY, activated(at, kept), up), at.name(DOWN), size, c.hidden_size)


# --- GGUF files ----------------------------------------------------------------------------------------------------------


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the fields that a GGUF file states in another form. Instead of the sparsities, the file states quantiles of the standard normal
    distribution in f32, from which sparsities are computed with six decimals. The number of rows of the per-layer table is the size of the
    vocabulary, because converters pad the table."""
    config["vocab_size_per_layer_input"] = config.get("vocab_size")
    if are_integers(sizes := config.get("intermediate_size")):
        config["intermediate_size"] = sizes.tolist()
    quantiles = metadata.get("activation_sparsity_scale")
    if isinstance(quantiles, np.ndarray) and quantiles.dtype.kind == "f":
        config["activation_sparsity_pattern"] = [round(NormalDist().cdf(quantile), 6) for quantile in quantiles.tolist()]


GGUF = Gguf(
    "gemma3n",
    {
        "altup.active_idx": "altup_active_idx",
        "altup.num_inputs": "altup_num_inputs",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "attention.sliding_window": "sliding_window",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    {
        **GGUF_LAYER_NAMES,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "inp_gate": "per_layer_input_gate",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    stacked={"altup_proj": "model.altup_projections.*", "altup_unembd_proj": "model.altup_unembed_projections.*"},
    complete=complete,
)
FAMILY = DecoderFamily((f"{MULTIMODAL}_text", MULTIMODAL), read, layer, layer_inputs=layer_inputs, widen=widen, narrow=narrow, gguf=GGUF)
