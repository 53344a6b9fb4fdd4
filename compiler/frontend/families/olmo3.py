"""OLMo 3: OLMo 2 with a window in three of four layers. In layers with a window, the rope is not scaled, unless the file states a separate
rope for these layers."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig, read_windows
from compiler.frontend.families import olmo2
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.rope import Rope, read_rope, rope_fields


def read(fields: Fields) -> ModelConfig:
    fields.fill(rope_theta=500_000.0)
    config = olmo2.read(fields)
    rope = read_rope(fields, config.head_dim, layer_type="full_attention")
    if "sliding_attention" in rope_fields(fields):
        local = read_rope(fields, config.head_dim, layer_type="sliding_attention")
    else:
        local = Rope(rope.theta, config.head_dim)
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    return replace(
        config,
        rope=rope,
        local_rope=local,
        max_context=rope.max_context(fields.integer("max_position_embeddings", 2048)),
        windows=read_windows(fields, window, lambda layer: (layer + 1) % 4 != 0),
    )


# GGUF files of OLMo 2 name the same architecture, but state no window. So the key of the window marks files of OLMo 3.
GGUF = replace(olmo2.GGUF, fields={"attention.sliding_window": "sliding_window"}, mark="attention.sliding_window")
FAMILY = DecoderFamily(("olmo3",), read, olmo2.layer, gguf=GGUF)
