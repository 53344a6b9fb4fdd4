"""Describe small random models that hear audio in conversations, and the conversations in which their goldens are made
(`make_listening.py`). Their windows last 2 s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.media import recording
from tests.golden.small_model import SmallModel
from tests.golden.vision_subject import LETTERS, text_of, token_of

HOP = 160
NUM_POSITIONS = 100  # frames of a window
WINDOW = NUM_POSITIONS * 2 * HOP  # samples of a window
LENGTHS = (9_041, 31_999, 75_123)  # samples of the recordings: the last one needs three windows
CONVERSATIONS = (("What is it?", [0]), ("Compare.", [1, 2]), ("Hello!", []))  # a text, and the recordings before it
SIZES: Mapping[str, Any] = {"num_mel_bins": 128, "max_source_positions": NUM_POSITIONS, "activation_function": "gelu"}


@dataclass(frozen=True)
class Subject(SmallModel):
    kind = "listening_models"

    config: Mapping[str, Any]
    special: tuple[str, ...]  # texts of the special tokens: the first begins a text, the second ends an answer
    audio_text: str
    template: str
    merge: int  # frames of a token

    @property
    def tokens(self) -> list[str]:
        return [*LETTERS, *self.special]

    @property
    def audio(self) -> int:
        return self.tokens.index(self.audio_text)

    def sound(self, number: int) -> NDArray[np.int16]:
        """Return the samples of a recording."""
        return recording(number, LENGTHS[number])


def _qwen2_audio() -> Subject:
    special = ("<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    encoder = {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 80, "encoder_layerdrop": 0.0}
    return Subject(
        "qwen2_audio",
        config={
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "audio_token_index": token_of(special, "<|AUDIO|>"),
            "tie_word_embeddings": False,
            "text_config": text_of("qwen2", 1e-5, special),
            "audio_config": {**SIZES, **encoder, "model_type": "qwen2_audio_encoder", "scale_embedding": False},
        },
        special=special,
        audio_text="<|AUDIO|>",
        template=(  # that of Qwen2-Audio-7B-Instruct
            "{% set audio_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
            "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
            "{% for content in message['content'] %}{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' "
            "or content['type'] == 'audio' %}{% set audio_count.value = audio_count.value + 1 %}Audio {{ audio_count.value }}: "
            "<|audio_bos|><|AUDIO|><|audio_eos|>\n{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}"
            "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
        merge=2,
    )


def _voxtral() -> Subject:
    special = ("<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    encoder = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    return Subject(
        "voxtral",
        config={
            "architectures": ["VoxtralForConditionalGeneration"],
            "model_type": "voxtral",
            "audio_token_id": token_of(special, "[AUDIO]"),
            "projector_hidden_act": "gelu",
            "text_config": {**text_of("llama", 1e-5, special), "head_dim": 16, "rope_theta": 10_000.0, "tie_word_embeddings": False},
            "audio_config": {**SIZES, **encoder, "model_type": "voxtral_encoder", "scale_embedding": False},
        },
        special=special,
        audio_text="[AUDIO]",
        template="",  # the server has one
        merge=4,
    )


SUBJECTS = {subject.name: subject for subject in (_qwen2_audio(), _voxtral())}
