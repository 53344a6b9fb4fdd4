"""Gemma 4: layers without a window have larger heads, and may derive values from the projected keys. The last layers may read the keys and
values of earlier layers. Layers may read per-layer embeddings, and may add the output of experts to that of the MLP. Models of the type
gemma4 may also read images of any size; models of the other types read only text. Encoders of audio are not supported."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.config import (
    Heads,
    LayerInputs,
    ModelConfig,
    read_decoder,
    read_softcap,
    read_windows,
    text_fields,
)
from compiler.frontend.cutting import FILLED
from compiler.frontend.families.gemma2 import GGUF_LAYER_NAMES, NORMS
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.gguf.layers import are_integers
from compiler.frontend.layers.decoder import QKV, Layer, Step, activated, append, attend_kept, gated_mlp, head_norm, norm, rotate
from compiler.frontend.layers.mixture import experts
from compiler.frontend.mixture import ExpertNames, Mixture
from compiler.frontend.rope import read_rope
from compiler.frontend.towers import FieldNames, check_tokens, read_any_size, read_merge, read_theta
from compiler.frontend.vision import Connector, Tower, Vision
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ops.elementwise import ADD, LESS, MULTIPLY, WHERE
from compiler.ops.index import SCATTER

NAMES = ExpertNames(
    "router.proj",
    "experts.gate_proj",
    "experts.up_proj",
    "experts.down_proj",
    scales="router.per_expert_scale",
    stacked=("experts.gate_up_proj", "experts.down_proj"),
    halves=True,
)
MULTIMODAL = "gemma4"
IMAGE_TOKEN = "image_token_id"
ENCODER: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10_240,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
# The type of models that have no separate encoders of images and audio, no experts and no per-layer embeddings.
UNIFIED = "gemma4_unified"
ROPES = {  # the default of rope_parameters
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
PERIOD = 6  # layers per period; the last layer of a period has no window, unless layer_types says otherwise


def read(fields: Fields) -> ModelConfig:
    model_type = fields.text("model_type")
    unified = model_type.startswith(UNIFIED)
    outer, vision = fields, _read_vision(fields) if model_type == MULTIMODAL and fields.raw("vision_config") else None
    if not model_type.endswith("_text"):
        fields = text_fields(fields, {"model_type": f"{model_type}_text"})
    fields.fill(num_attention_heads=8, num_key_value_heads=4, head_dim=256, intermediate_size=9216, hidden_activation="gelu_pytorch_tanh")
    fields.fill(max_position_embeddings=262_144 if unified else 131_072, tie_word_embeddings=True, rope_parameters=ROPES)
    config = read_decoder(fields, act="hidden_activation", bias="attention_bias")
    if fields.text("use_bidirectional_attention", "vision") != "vision":
        raise fields.error("use_bidirectional_attention", "vision or null, because attention between text tokens is causal")
    windows = read_windows(fields, fields.integer("sliding_window", 1024 if unified else 512), lambda layer: (layer + 1) % PERIOD != 0)
    windows = (*windows[:-1], None)  # the last layer never has a window
    config = replace(
        config,
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        windows=windows,
        local_rope=read_rope(fields, config.head_dim, layer_type="sliding_attention"),
        logit_softcap=read_softcap(fields, "final_logit_softcapping", None),
    )
    config = _with_widths(fields, sharing(fields, _with_global_heads(fields, config)))
    if unified:
        return config
    config = replace(config, layer_inputs=_read_inputs(fields), mixture=_read_mixture(fields))
    return config if vision is None else _seeing(outer, fields, config, vision)


def _read_vision(fields: Fields) -> Vision:
    inner = fields.fields("vision_config", ENCODER)
    inner.skip("model_type", "max_position_embeddings", "default_output_length", "global_head_dim")
    inner.require(attention_bias=False)
    vision = read_any_size(
        inner,
        Tower.GEMMA4,
        ENCODER,
        FieldNames(activation="hidden_activation", norm_eps="rms_norm_eps"),
        theta=read_theta(inner, 100.0),
        connector=Connector.AVERAGED,
        merge=read_merge(inner, "pooling_kernel_size"),
        image_token=fields.integer(IMAGE_TOKEN, 258_880, minimum=0),
        cutting=FILLED,
        around=("<|image>", "<image|>"),
        table_edge=inner.integer("position_embedding_size"),
        clips=inner.flag("use_clipped_linears", False),
        standardizes=inner.flag("standardize", False),
        is_optional=True,
    )
    inner.require_equal("head_dim", vision.hidden_size // vision.num_heads, "hidden_size / num_attention_heads")
    inner.require_equal("num_key_value_heads", vision.num_heads, "num_attention_heads")
    return vision


def _seeing(outer: Fields, fields: Fields, config: ModelConfig, vision: Vision) -> ModelConfig:
    """Return the configuration of a decoder with its encoder of images. If `use_bidirectional_attention` is "vision", as in larger models,
    the tokens of an image attend to each other in both directions in layers with a window. `outer` are the fields of the whole model, and
    `fields` those of the decoder. Raise ConfigError if the image token or the padding token is not in the vocabulary."""
    check_tokens(outer, vision, config.vocab_size, (IMAGE_TOKEN,))
    if fields.raw("use_bidirectional_attention") == "vision":
        vision = replace(vision, both_ways=True, windows_only=True)
    padding = fields.integer("pad_token_id", 0, minimum=0, maximum=config.vocab_size - 1)
    return replace(config, vision=vision, image_padding=padding)


def _with_global_heads(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the heads and the rope of the layers without a window. If `attention_k_eq_v` is true, these layers
    project values with the key matrix, and may have another number of key and value heads than layers with a window."""
    joint, stated = fields.flag("attention_k_eq_v", False), _read_overrides(fields, config)
    num_kv = stated.integer("num_key_value_heads", fields.integer("num_global_key_value_heads", config.num_kv_heads))
    if config.num_heads % num_kv:
        raise fields.error("num_global_key_value_heads", f"a divisor of num_attention_heads ({config.num_heads})")
    heads = Heads(num_kv if joint else config.num_kv_heads, stated.integer("head_dim", fields.integer("global_head_dim", 512)))
    return replace(
        config,
        rope=read_rope(fields, heads.size, layer_type="full_attention"),
        global_heads=heads,
        values_from_keys=frozenset(layer for layer, window in enumerate(config.windows) if joint and window is None),
    )


def _read_overrides(fields: Fields, config: ModelConfig) -> Fields:
    """Return the fields `head_dim` and `num_key_value_heads` of the layers without a window, which newer files state once per layer in
    `per_layer_config`. Return no fields if `per_layer_config` is absent. Raise ConfigError unless `per_layer_config` has equal objects for
    exactly the layers without a window."""
    given = fields.raw("per_layer_config", {})
    layers = {layer for layer, window in enumerate(config.windows) if window is None}
    expected = f"equal objects of head_dim and num_key_value_heads for the layers {', '.join(map(str, sorted(layers)))}"
    if not isinstance(given, dict) or not all(isinstance(number, str) and number.isdecimal() for number in given):
        raise fields.error("per_layer_config", expected)
    objects = [value for value in given.values() if isinstance(value, dict) and value.keys() <= {"head_dim", "num_key_value_heads"}]
    if given and ({int(number) for number in given} != layers or len(objects) != len(given) or any(o != objects[0] for o in objects)):
        raise fields.error("per_layer_config", expected)
    return Fields(objects[0] if objects else {}, f"per_layer_config of {fields.where}")


def sharing(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Return a configuration in which the last `num_kv_shared_layers` layers read the keys and values of an earlier layer: the last of the
    other layers that has the same window. Programs do not read the projections that checkpoints contain for these layers. Raise ConfigError
    if there is no such earlier layer. If `num_kv_shared_layers` is 0, return the configuration unchanged."""
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0, maximum=config.num_layers)
    if not num_shared:
        return config
    first = config.num_layers - num_shared
    last = {window: layer for layer, window in enumerate(config.windows[:first])}
    if not last.keys() >= set(config.windows):
        raise fields.error("num_kv_shared_layers", "a number that leaves one layer of each kind with its own keys and values")
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return replace(
        config,
        kv_sources=tuple(layer if layer < first else last[window] for layer, window in enumerate(config.windows)),
        unused=tuple(f"*layers.{layer}.self_attn.{part}.*" for layer in range(first, config.num_layers) for part in parts),
    )


def _with_widths(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Double the intermediate size of the layers that read the keys and values of other layers, if `use_double_wide_mlp` is true."""
    doubled, layers = fields.flag("use_double_wide_mlp", False), range(config.num_layers)
    sizes = tuple(config.intermediate_size << (doubled and config.kv_source(layer) != layer) for layer in layers)
    return replace(config, intermediate_sizes=sizes) if config.kv_sources else config


def _read_inputs(fields: Fields) -> LayerInputs | None:
    size, vocab_size = fields.integer("hidden_size_per_layer_input", 256, minimum=0), fields.integer("vocab_size_per_layer_input", 262_144)
    return LayerInputs(size, vocab_size) if size else None


def _read_mixture(fields: Fields) -> Mixture | None:
    if not fields.flag("enable_moe_block", False):
        fields.skip("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    count = fields.integer("num_experts")
    return Mixture(count, fields.integer("top_k_experts", maximum=count), fields.integer("moe_intermediate_size"))


def layer(at: Layer, x: Var) -> Var:
    """Add the outputs of attention, MLP and per-layer embedding to the residual stream, and multiply the sum by a learned number."""
    net = at.step.net
    x = net.add(x, norm(at, attend_shared(at, norm(at, x, NORMS[0])), NORMS[1]))
    x = net.add(x, norm(at, _feed(at, x), NORMS[3]))
    if at.step.layer_inputs is not None:
        x = net.add(x, norm(at, join_inputs(at, x, at.step.layer_inputs), "post_per_layer_input_norm"))
    return net.call(MULTIPLY, x, net.vector(at.name("layer_scalar"), 1))


def attend_shared(at: Layer, h: Var) -> Var:
    """Attend to the keys and values of this layer, or to those of an earlier layer if this layer has none of its own. Queries and keys get
    a norm per head and are rotated. Values get a norm without weights. A layer with keys and values of its own appends them to the
    cache."""
    net, c, heads = at.step.net, at.step.config, at.heads
    kinds = 1 if c.kv_source(at.number) != at.number else 2 if at.number in c.values_from_keys else 3
    counts = [c.num_heads, heads.num_kv, heads.num_kv][:kinds]
    wide = net.linear(h, [at.name(name) for name in QKV[:kinds]], c.hidden_size, [count * heads.size for count in counts], bias=c.qkv_bias)
    parts = net.reshape(wide, at.step.t, sum(counts), heads.size)
    if kinds > 1:
        k, v = (net.slice(parts, 1, end - heads.num_kv, end) for end in (c.num_heads + heads.num_kv, sum(counts)))
        append(at, rotate(at, head_norm(at, k, "self_attn.k_norm")), net.unit_norm(v, heads.size, c.norm_eps))
    return attend_kept(at, rotate(at, head_norm(at, net.slice(parts, 1, 0, c.num_heads), "self_attn.q_norm")))


def _feed(at: Layer, x: Var) -> Var:
    """Apply the MLP and, if the model has experts, add the output of the experts. `x` is the residual stream, which MLP and experts read
    after separate norms. With experts, each of the two outputs gets a norm of its own. The router reads `x` after a norm without weights,
    scaled by a learned vector."""
    net, c, dense = at.step.net, at.step.config, gated_mlp(at, norm(at, x, NORMS[2]))
    if c.mixture is None:
        return dense
    scale = net.scale(net.vector(at.name("router.scale"), c.hidden_size), c.hidden_size**-0.5)
    routed = net.call(MULTIPLY, net.unit_norm(x, c.hidden_size, c.norm_eps), scale)
    chosen = experts(at, norm(at, x, f"{NORMS[2]}_2"), c.mixture, NAMES, routed=routed)
    return net.add(norm(at, dense, f"{NORMS[3]}_1"), norm(at, chosen, f"{NORMS[3]}_2"))


def join_inputs(at: Layer, x: Var, inputs: Var) -> Var:
    """Multiply the layer's per-layer embedding by a gate that is computed from `x`, and project the result to the width of the residual
    stream. `inputs` has the embeddings of all layers, [tokens, layers, size]."""
    net, c = at.step.net, at.step.config
    assert c.layer_inputs is not None, c
    size = c.layer_inputs.size
    own = net.reshape(net.slice(inputs, 1, at.number, at.number + 1), at.step.t, size)
    gate = activated(at, net.linear(x, at.name("per_layer_input_gate"), c.hidden_size, size))
    return net.linear(net.call(MULTIPLY, gate, own), at.name("per_layer_projection"), size, c.hidden_size)


def layer_inputs(step: Step, x: Var) -> Var | None:
    """Return the per-layer embeddings, [tokens, layers, size]: (scaled vectors of a table + a normalised projection of the token embeddings
    `x`) / sqrt(2). Return None if the model has no per-layer embeddings. Tokens with ids beyond the table read its first row."""
    net, c = step.net, step.config
    if c.layer_inputs is None:
        return None
    size, vocab_size = c.layer_inputs.size, c.layer_inputs.vocab_size
    tokens, seen = step.batch.tokens, step.batch.seen
    if seen is not None:  # a token of an image reads the vectors of the padding token from the table
        none = net.call(MULTIPLY, seen.at, ScalarValue(0, "i32"))
        tokens = net.call(SCATTER, tokens, seen.at, net.call(ADD, none, ScalarValue(c.image_padding, "i32")), axis=0)
    if vocab_size < c.vocab_size:
        zero = ScalarValue(0, "i32")
        tokens = net.call(WHERE, net.call(LESS, tokens, ScalarValue(vocab_size, "i32")), tokens, zero)
    found = net.embedding(f"{step.prefix}embed_tokens_per_layer", tokens, vocab_size, c.num_layers * size)
    made = net.linear(x, f"{step.prefix}per_layer_model_projection", c.hidden_size, c.num_layers * size)
    made = net.reshape(net.scale(made, c.hidden_size**-0.5), step.t, c.num_layers, size)
    normed = net.rms_norm(made, f"{step.prefix}per_layer_projection_norm", size, c.norm_eps)
    return net.scale(net.add(normed, net.reshape(net.scale(found, size**0.5), step.t, c.num_layers, size)), 0.5**0.5)


def complete(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    """Add the fields that a GGUF file states as lists with a value per layer, and those that follow from the names of its tensors. Replace
    the fields of the rope by `rope_parameters`. A pair of dimensions does not rotate if the divisor of its frequency is at least
    UNROTATED."""
    config["model_type"] = "gemma4_text"
    has_window = [kind == "sliding_attention" for kind in config.get("layer_types", [])]
    config["global_head_dim"], config["head_dim"] = config.get("head_dim"), metadata.get("attention.key_length_swa")
    if are_integers(heads := config.get("num_key_value_heads")) and len(heads) == len(has_window):
        for kind, field in ((True, "num_key_value_heads"), (False, "num_global_key_value_heads")):
            if kind in has_window:
                config[field] = int(heads[has_window.index(kind)])
    if are_integers(sizes := config.get("intermediate_size")) and len(sizes):
        config["intermediate_size"] = int(sizes[0])
        config["use_double_wide_mlp"] = bool(sizes[-1] == 2 * sizes[0])
    if False in has_window:
        config["attention_k_eq_v"] = f"blk.{has_window.index(False)}.attn_v.weight" not in tensors
    divisors = (config.pop("rope_scaling") or {}).get("short_factor", [])
    share = {"partial_rotary_factor": sum(divisor < UNROTATED for divisor in divisors) / len(divisors)} if divisors else {}
    config.pop("partial_rotary_factor", None)
    config["rope_parameters"] = {
        "sliding_attention": {**ROPES["sliding_attention"], "rope_theta": metadata.get("rope.freq_base_swa", 10_000.0)},
        "full_attention": {**ROPES["full_attention"], **share, "rope_theta": config.pop("rope_theta", 1e6)},
    }
    config["enable_moe_block"] = "blk.0.ffn_gate_inp.weight" in tensors
    config["vocab_size_per_layer_input"] = config.get("vocab_size")


UNROTATED = 1e29  # a pair of dimensions whose frequency has at least this divisor does not rotate
GGUF = Gguf(
    "gemma4",
    {
        "attention.sliding_window": "sliding_window",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "expert_used_count": "top_k_experts",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    {
        **GGUF_LAYER_NAMES,
        "pre_ffw_norm_2": f"{NORMS[2]}_2",
        "post_ffw_norm_1": f"{NORMS[3]}_1",
        "post_ffw_norm_2": f"{NORMS[3]}_2",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp.scale": "router.scale",
    },
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    complete=complete,
)
FAMILY = DecoderFamily(
    ("gemma4", "gemma4_text", UNIFIED, f"{UNIFIED}_text"), read, layer, layer_inputs=layer_inputs, experts=NAMES, gguf=GGUF
)
