"""Describe small random models that read images and audio, and the conversations in which their goldens are made (`make_omni.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.media import SIZES, picture, recording
from tests.golden.small_model import SmallModel
from tests.golden.vision_any_size import LATER_ENCODER
from tests.golden.vision_subject import LETTERS, PATCH, PIXELS, text_of, token_of

NUM_SOUNDS = 4
IMAGE, AUDIO, TEXT = "image", "audio", "text"
# The parts of the user's message: a kind, and the number of an image or of a recording, or a text.
CONVERSATIONS: tuple[tuple[tuple[str, Any], ...], ...] = (
    ((IMAGE, 0), (AUDIO, 0), (TEXT, "What is it?")),
    ((AUDIO, 1), (TEXT, "and"), (IMAGE, 1), (AUDIO, 2), (IMAGE, 2), (TEXT, "Compare.")),
    ((AUDIO, 3), (TEXT, "What is said?")),
    ((TEXT, "Look:"), (IMAGE, 2)),
    ((TEXT, "Hello!"),),
)


@dataclass(frozen=True)
class Subject(SmallModel):
    kind = "omni_models"

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    special: tuple[str, ...]  # texts of the special tokens: the first begins a text, the second ends an answer
    special_names: Mapping[str, str]  # attributes of the tokenizer, and the special tokens that they name
    template: str
    square: int  # pixels of an edge of a square of a crop
    lengths: tuple[int, ...]  # samples of the recordings

    @property
    def tokens(self) -> list[str]:
        return [*LETTERS, *self.special]

    @property
    def image(self) -> int:
        return self.tokens.index(self.special_names["image_token"])

    @property
    def audio(self) -> int:
        return self.tokens.index(self.special_names["audio_token"])

    @property
    def files(self) -> list[bytes]:
        """The images as files."""
        return [picture(number) for number in range(len(SIZES))]

    def sound(self, number: int) -> NDArray[np.int16]:
        """Return the samples of a recording."""
        return recording(number, self.lengths[number])


QWEN2_5_OMNI_TEMPLATE = (  # that of Qwen2.5-Omni-7B
    "{% set audio_count = namespace(value=0) %}{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}"
    "<|vision_bos|><|IMAGE|><|vision_eos|>{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "{% set audio_count.value = audio_count.value + 1 %}{% if add_audio_id %}Audio {{ audio_count.value }}: {% endif %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}"
    "<|vision_bos|><|VIDEO|><|vision_eos|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _qwen2_5_omni() -> Subject:
    names = {
        **{f"{name}_token": f"<|{name.upper()}|>" for name in ("image", "audio", "video")},
        **{f"{name}_{end}_token": f"<|{name}_{end}|>" for name in ("vision", "audio") for end in ("bos", "eos")},
    }
    special = ("<|im_start|>", "<|im_end|>", *names.values())
    text = text_of("qwen2_5_omni_text", 1e-6, special)
    encoder = {"d_model": 48, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 80, "activation_function": "gelu"}
    return Subject(
        "qwen2_5_omni",
        config={
            "architectures": ["Qwen2_5OmniModel"],
            "model_type": "qwen2_5_omni",
            "enable_audio_output": True,
            "talker_config": {"model_type": "qwen2_5_omni_talker"},
            "token2wav_config": {"model_type": "qwen2_5_omni_token2wav"},
            "thinker_config": {
                "model_type": "qwen2_5_omni_thinker",
                **{f"{name}_token_index": token_of(special, names[f"{name}_token"]) for name in ("image", "audio", "video")},
                "vision_start_token_id": token_of(special, "<|vision_bos|>"),
                "vision_end_token_id": token_of(special, "<|vision_eos|>"),
                "audio_start_token_id": token_of(special, "<|audio_bos|>"),
                "audio_end_token_id": token_of(special, "<|audio_eos|>"),
                "position_id_per_seconds": 25,
                "seconds_per_chunk": 2,
                "tie_word_embeddings": False,
                "text_config": {
                    **text,
                    "init_std": 0.02,
                    "tie_word_embeddings": False,
                    "use_sliding_window": False,
                    "rope_theta": 10_000.0,
                    "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
                },
                "vision_config": {
                    "model_type": "qwen2_5_omni_vision_encoder",
                    **LATER_ENCODER,
                    "window_size": 48,  # 3 tokens
                    "fullatt_block_indexes": [1],
                    "tokens_per_second": 25,
                },
                "audio_config": {
                    "model_type": "qwen2_5_omni_audio_encoder",
                    **encoder,
                    "max_source_positions": 1500,
                    "n_window": 100,
                    "num_mel_bins": 128,
                    "output_dim": text["hidden_size"],
                    "scale_embedding": False,
                },
            },
        },
        processor={
            **PIXELS,
            "chunk_length": 300,
            "do_convert_rgb": True,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": 40 * 16 * 16,  # the first image has more
            "merge_size": 2,
            "min_pixels": 12 * 16 * 16,  # the second image has fewer
            "patch_size": PATCH,
            "processor_class": "Qwen2_5OmniProcessor",
            "resample": 3,
            "temporal_patch_size": 2,
        },
        special=special,
        special_names=names,
        template=QWEN2_5_OMNI_TEMPLATE,
        square=2 * PATCH,
        lengths=(9_041, 31_999, 75_123, 32_201),  # the third needs three windows, the last ends with one frame of a second
    )


def _qwen3_omni_moe() -> Subject:
    like = _qwen2_5_omni()
    names = {
        **{f"{name}_token": f"<|{name}_pad|>" for name in ("image", "audio", "video")},
        **{f"{name}_{end}_token": f"<|{name}_{text}|>" for name in ("vision", "audio") for end, text in (("bos", "start"), ("eos", "end"))},
    }
    special, template = ("<|im_start|>", "<|im_end|>", *names.values()), like.template
    for name, text in like.special_names.items():
        template = template.replace(text, names[name])
    thinker = like.config["thinker_config"]
    text = {name: value for name, value in thinker["text_config"].items() if name not in ("init_std", "use_sliding_window")}
    experts = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": []}
    sections = {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "interleaved": True, "rope_type": "default", "type": "default"}
    parts = {"audio_start": "<|audio_start|>", "vision_start": "<|vision_start|>"}
    ids = {**{name: names[f"{name}_token"] for name in ("image", "audio", "video")}, **parts}
    return replace(
        like,
        name="qwen3_omni_moe",
        config={
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "enable_audio_output": True,
            "thinker_config": {
                "model_type": "qwen3_omni_moe_thinker",
                **{f"{name}_token_id": token_of(special, text) for name, text in ids.items()},
                "position_id_per_seconds": 13,
                "tie_word_embeddings": False,
                "text_config": {
                    **text,
                    **experts,
                    "model_type": "qwen3_omni_moe_text",
                    "head_dim": 16,
                    "num_hidden_layers": 3,
                    "vocab_size": len(LETTERS) + len(special),
                    "rope_scaling": sections,
                },
                "vision_config": {
                    "model_type": "qwen3_omni_moe_vision_encoder",
                    **LATER_ENCODER,
                    "num_position_embeddings": 36,
                    "deepstack_visual_indexes": [0, 1],
                },
                "audio_config": {
                    **{name: value for name, value in thinker["audio_config"].items() if name != "n_window"},
                    "model_type": "qwen3_omni_moe_audio_encoder",
                    "n_window": 50,
                    "n_window_infer": 200,
                    "conv_chunksize": 500,
                    "downsample_hidden_size": 12,
                },
            },
        },
        processor={**like.processor, "processor_class": "Qwen3OmniMoeProcessor"},
        special=special,
        special_names=names,
        template=template,
        # None is shorter than a piece. Those of one conversation have one length: the processor would fill up shorter ones with silence.
        lengths=(17_041, 75_123, 75_123, 33_333),
    )


SUBJECTS = {subject.name: subject for subject in (_qwen2_5_omni(), _qwen3_omni_moe())}
