"""Qwen2.5-Omni's thinker, which reads text, images and audio and writes text: the encoder of images of Qwen2.5-VL, an encoder of audio
whose frames attend to each other within windows of 2 s, and the decoder of Qwen2. The talker and token2wav, which generate speech, are left
out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compiler.frontend.audio import Joining, Listening
from compiler.frontend.audio_tower import read_listening, read_token
from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import llama, qwen2
from compiler.frontend.families.qwen2_5_vl import read_windowed
from compiler.frontend.families.qwen2_audio import AUDIO_TOKEN, FRAMES
from compiler.frontend.families.qwen2_vl import IMAGE_TOKEN_ID, SECTIONS
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.rope import read_axes
from compiler.frontend.towers import check_tokens
from compiler.frontend.vision import Tower

WHOLE, THINKER = "qwen2_5_omni", "qwen2_5_omni_thinker"
SPEAKING = ("talker", "token2wav")  # prefixes of the tensors that are left out
TEXT: dict[str, Any] = {  # the defaults of transformers, which are the sizes of the model of 7 billion weights
    "model_type": "qwen2_5_omni_text",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1_000_000.0,
}
AUDIO = {"n_window": 100, "output_dim": 3584}  # defaults of the audio_config
IMAGE_TOKEN = "image_token_index"
MOST_S = 300  # maximum seconds of a recording that the processor of transformers accepts
FRAME_S = 0.02  # seconds of a frame


def read(fields: Fields) -> ModelConfig:
    thinker, text = thinker_of(fields, WHOLE, TEXT)
    text.skip("init_std")
    config = qwen2.read(text)
    assert config.rope is not None
    vision = read_windowed(thinker, Tower.OMNI, image_token=thinker.integer(IMAGE_TOKEN, IMAGE_TOKEN_ID, minimum=0))
    inner = thinker.fields("vision_config")
    inner.require_equal("out_hidden_size", config.hidden_size, "hidden_size of the decoder")
    inner.skip("embed_dim")  # files repeat hidden_size under this name
    check_tokens(thinker, vision, config.vocab_size, (IMAGE_TOKEN,))
    axes = read_axes(text, config.rope.size // 2, SECTIONS, interleaved=False)
    rope, listening = replace(config.rope, axes=axes), _read_listening(thinker, config)
    left_out = () if thinker is fields else SPEAKING
    return replace(config, family=WHOLE, rope=rope, vision=vision, listening=listening, left_out=left_out)


def thinker_of(fields: Fields, whole: str, decoder: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Return the fields of the thinker, and those of its decoder, with the defaults `decoder`. If `whole` is the model type, the thinker is
    the part `thinker_config`; otherwise it is the whole model. The thinker states whether the embeddings are tied. Raise ConfigError if the
    decoder has another `model_type` than `decoder`."""
    thinker = fields
    if fields.text("model_type") == whole:
        fields.skip(*fields.values)
        thinker = fields.fields("thinker_config")
    text = text_fields(thinker, decoder)
    text.values = {**text.values, "tie_word_embeddings": thinker.flag("tie_word_embeddings", False)}
    if text.text("model_type") != decoder["model_type"]:
        raise text.error("model_type", repr(decoder["model_type"]))
    return thinker, text


def _read_listening(thinker: Fields, config: ModelConfig) -> Listening:
    inner = thinker.fields("audio_config")
    inner.fill(**AUDIO)
    inner.require_equal("output_dim", config.hidden_size, "hidden_size of the decoder")
    listening = read_listening(
        thinker,
        merge=FRAMES,
        window="n_window",
        joining=Joining.MEAN,
        audio_token=read_token(thinker, config.vocab_size, AUDIO_TOKEN),
        ends=True,
        is_cut=True,
        sinusoids=True,
    )
    return replace(listening, most_windows=round(MOST_S / (FRAME_S * listening.num_positions)))


FAMILY = DecoderFamily(
    (WHOLE, THINKER),
    read,
    llama.layer,
    renamed={"thinker.": "", "audio_tower.ln_post.": "audio_tower.layer_norm.", "audio_tower.proj.": "audio_tower.projector.linear."},
)
