"""Qwen3-Omni's thinker, which reads text, images and audio and writes text: the encoder of images and the decoder of Qwen3-VL with mixtures
of experts, and an encoder of audio that reads pieces of 1 s, and in which frames attend to each other within 8 s. The talker and code2wav,
which generate speech, are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler.frontend.audio import Joining, Listening
from compiler.frontend.audio_tower import read_listening, read_token
from compiler.frontend.config import ModelConfig, read_activation
from compiler.frontend.families import qwen3_moe, qwen3_vl
from compiler.frontend.families.qwen2_5_omni import thinker_of
from compiler.frontend.families.qwen2_audio import AUDIO_TOKEN
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

WHOLE, THINKER = "qwen3_omni_moe", "qwen3_omni_moe_thinker"
SPEAKING = ("talker", "code2wav")  # prefixes of the tensors that are left out
TEXT: dict[str, Any] = {  # the defaults of transformers
    "model_type": "qwen3_omni_moe_text",
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
# defaults of the audio_config
AUDIO = {"n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480, "output_dim": 3584}
IMAGES = ("apply_vit_abs_pos_embed", "image_size", "tokens_per_second")  # fields that change nothing, or concern videos
HALF_PIECE = 50  # hops of half a piece; with any other number, the processor of transformers counts tokens wrongly
FRAMES = 4  # frames, of two hops each, from which three convolutions make one row


def read(fields: Fields) -> ModelConfig:
    thinker, _ = thinker_of(fields, WHOLE, TEXT)
    config = qwen3_vl.read_seeing(thinker, TEXT["model_type"], _read_text)
    thinker.fields("vision_config").skip(*IMAGES)
    return replace(config, family=WHOLE, listening=_read_listening(thinker, config), left_out=() if thinker is fields else SPEAKING)


def _read_text(text: Fields) -> ModelConfig:
    for name in ("rope_scaling", "rope_parameters"):
        if name in text:
            text.fields(name).skip("interleaved")  # files repeat `mrope_interleaved` under this name
    return qwen3_moe.read(text)


def _read_listening(thinker: Fields, config: ModelConfig) -> Listening:
    """Return the configuration of the encoder of audio. Raise ConfigError if its output has another size than the decoder's vectors, if
    `n_window` is not HALF_PIECE, or if `n_window_infer` is no multiple of a piece."""
    inner = thinker.fields("audio_config")
    inner.fill(**AUDIO)
    inner.skip("conv_chunksize")  # limits the memory that transformers uses
    inner.require_equal("output_dim", config.hidden_size, "hidden_size of the decoder")
    if inner.integer("n_window") != HALF_PIECE:
        raise inner.error("n_window", str(HALF_PIECE))
    piece, window = 2 * HALF_PIECE, inner.integer("n_window_infer", maximum=1 << 16)
    if window % piece:
        raise inner.error("n_window_infer", f"a multiple of {piece}, the hops of a piece")
    return read_listening(
        thinker,
        merge=FRAMES,
        window=-(-piece // (2 * FRAMES)),
        joining=Joining.PERCEPTRON,
        audio_token=read_token(thinker, config.vocab_size, AUDIO_TOKEN),
        connector_activation=read_activation(inner, "activation_function", "gelu"),
        ends=True,
        is_cut=True,
        sinusoids=True,
        reflects=True,
        piece_hops=piece,
        num_pieces=window // piece,
        channels=inner.integer("downsample_hidden_size"),
    )


FAMILY = DecoderFamily(
    (WHOLE, THINKER),
    read,
    qwen3_moe.layer,
    experts=qwen3_moe.NAMES,
    renamed={
        "thinker.": "",
        "audio_tower.ln_post.": "audio_tower.layer_norm.",
        "audio_tower.proj1.": "audio_tower.projector.linear_1.",
        "audio_tower.proj2.": "audio_tower.projector.linear_2.",
        "visual.merger_list.": "visual.deepstack_merger_list.",
        ".ln_q.": ".norm.",
        ".mlp.0.": ".linear_fc1.",
        ".mlp.2.": ".linear_fc2.",
    },
)
