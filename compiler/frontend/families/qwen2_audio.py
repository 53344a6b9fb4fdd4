"""Qwen2-Audio: the encoder of Whisper-large-v3, the decoder of Qwen2, and a connector that makes one row of two neighbouring frames. The
model hears the first 30 s of a recording."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.audio import Joining
from compiler.frontend.audio_tower import read_listening, read_token
from compiler.frontend.config import ModelConfig, text_fields
from compiler.frontend.families import llama, qwen2
from compiler.frontend.families.llava import OF_DECODERS
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields

AUDIO_TOKEN = 151_646
DEFAULTS = {**OF_DECODERS["qwen2"], "hidden_size": 4096, "model_type": "qwen2"}
FRAMES = 2  # frames that become one row


def read(fields: Fields) -> ModelConfig:
    text = text_fields(fields, DEFAULTS)
    if text.text("model_type") != "qwen2":
        raise text.error("model_type", "'qwen2'")
    config = qwen2.read(text)
    listening = read_listening(
        fields,
        merge=FRAMES,
        joining=Joining.MEAN,
        audio_token=read_token(fields, config.vocab_size, AUDIO_TOKEN),
        ends=True,
        most_windows=1,
    )
    return replace(config, family="qwen2_audio", listening=listening)


FAMILY = DecoderFamily(("qwen2_audio",), read, llama.layer)
