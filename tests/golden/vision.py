"""Small random vision models, one per layout of images, and the conversations in which their goldens were made (`make_vision.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "vision_models"
LETTERS = "ĠĊabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:;-_'\"()[]{}<>/|=+*#"  # byte-level BPE writes a space as Ġ
SIZES = ((200, 61), (37, 41), (75, 130))  # width and height
CONVERSATIONS = (("What is it?", [0]), ("Compare.", [1, 2]), ("Hello!", []))  # a text, and the images before it
CONTINUATION = 64
PATCH = 8
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
}
ENCODER: Mapping[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
PIXELS: Mapping[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "rescale_factor": 1 / 255,
}


@dataclass(frozen=True)
class Subject:
    """A small model of a family."""

    name: str
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    special: tuple[str, ...]  # texts of the special tokens: the first begins a text, the second ends an answer
    image_text: str
    template: str
    rows: int  # tokens of a crop; of a square of a crop that may have any size
    classes: tuple[str, str]  # of transformers: the processor, and that of images on Pillow
    options: Mapping[str, Any]  # of the processor
    special_names: Mapping[str, str]  # attributes of the tokenizer, and the special tokens that they name
    square: int = 0  # pixels of an edge of a square of a crop that may have any size; 0: crops have one size

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def any_size(self) -> bool:
        return self.square > 0

    @property
    def crop(self) -> int:
        """The pixels of an edge of a crop; of a square of a crop that may have any size."""
        if self.any_size:
            return self.square
        size = self.config["vision_config"]["image_size"]
        return size[0] if isinstance(size, list) else size

    @property
    def tokens(self) -> list[str]:
        return [*LETTERS, *self.special]

    @property
    def image(self) -> int:
        return self.tokens.index(self.image_text)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        return dict(np.load(self.folder / "golden.npz"))

    @property
    def files(self) -> list[bytes]:
        """The images as files."""
        return [self.arrays[f"image_{number}"].tobytes() for number in range(len(SIZES))]


def _token(special: tuple[str, ...], text: str) -> int:
    return len(LETTERS) + special.index(text)


def _text(model_type: str, epsilon: float, special: tuple[str, ...]) -> dict[str, Any]:
    """Return the config of a decoder. The second special token ends an answer."""
    sizes = {"vocab_size": len(LETTERS) + len(special), "eos_token_id": len(LETTERS) + 1}
    return {**TEXT, "model_type": model_type, "rms_norm_eps": epsilon, **sizes}


def _idefics3() -> Subject:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    special = ("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *places)
    text = _text("llama", 1e-5, special)
    return Subject(
        "idefics3",
        config={
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "image_token_id": _token(special, "<image>"),
            "scale_factor": 2,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "text_config": text,
            "vision_config": {**ENCODER, "model_type": "idefics3", "image_size": 48, "patch_size": PATCH},
        },
        processor={
            **PIXELS,
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_pad": True,
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": 48},
            "resample": 1,
            "size": {"longest_edge": 144},
        },
        special=special,
        image_text="<image>",
        template=(  # that of SmolVLM
            "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
            "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
            "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
            "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
            "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
        ),
        rows=9,
        classes=("Idefics3Processor", "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil"),
        options={"image_seq_len": 9},
        special_names={},
    )


def _gemma3() -> Subject:
    special = ("<bos>", "<end_of_turn>", "<start_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
    return Subject(
        "gemma3",
        config={
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "image_token_index": _token(special, "<image_soft_token>"),
            "boi_token_index": _token(special, "<start_of_image>"),
            "eoi_token_index": _token(special, "<end_of_image>"),
            "eos_token_id": _token(special, "<end_of_turn>"),
            "mm_tokens_per_image": 9,
            "pad_token_id": 0,
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "vocab_size": len(LETTERS) + len(special),
                "num_hidden_layers": 3,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
                "sliding_window": 14,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "eos_token_id": _token(special, "<end_of_turn>"),
            },
            "vision_config": {
                **ENCODER,
                "model_type": "siglip_vision_model",
                "image_size": 48,
                "patch_size": PATCH,
                "vision_use_head": False,
            },
        },
        processor={
            **PIXELS,
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 9,
            "resample": 2,
            "size": {"height": 48, "width": 48},
        },
        special=special,
        image_text="<image_soft_token>",
        template=(
            "{{ bos_token }}{%- for message in messages -%}{{ '<start_of_turn>' + message['role'] + '\n' }}"
            "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
            "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
            "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
            "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
        ),
        rows=9,
        classes=("Gemma3Processor", "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil"),
        options={"image_seq_length": 9},
        special_names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    )


LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _llava() -> Subject:
    special = ("<s>", "</s>", "<image>")
    text = _text("llama", 1e-5, special)
    vision = {
        **ENCODER,
        "num_hidden_layers": 3,
        "model_type": "clip_vision_model",
        "image_size": 48,
        "patch_size": 16,
        "projection_dim": 32,
    }
    return Subject(
        "llava",
        config={
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": _token(special, "<image>"),
            "image_seq_length": 9,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": vision,
        },
        processor={
            **PIXELS,
            "crop_size": {"height": 48, "width": 48},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "image_processor_type": "CLIPImageProcessor",
            "resample": 3,
            "size": {"shortest_edge": 48},
        },
        special=special,
        image_text="<image>",
        template=LLAVA,
        rows=9,
        classes=("LlavaProcessor", "clip.image_processing_pil_clip.CLIPImageProcessorPil"),
        options={"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        special_names={"image_token": "<image>"},
    )


def _llava_siglip() -> Subject:
    """Return a model like LLaVA-Interleave. Its crops have pixels behind the last whole patch."""
    special = ("<|im_start|>", "<|im_end|>", "<image>")
    text = _text("qwen2", 1e-6, special)
    return Subject(
        "llava_siglip",
        config={
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": _token(special, "<image>"),
            "image_seq_length": 9,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": {**ENCODER, "model_type": "siglip_vision_model", "image_size": 52, "patch_size": 16, "vision_use_head": False},
        },
        processor={
            **PIXELS,
            "do_convert_rgb": True,
            "image_processor_type": "SiglipImageProcessor",
            "resample": 3,
            "size": {"height": 52, "width": 52},
        },
        special=special,
        image_text="<image>",
        template=LLAVA,
        rows=9,
        classes=("LlavaProcessor", "siglip.image_processing_pil_siglip.SiglipImageProcessorPil"),
        options={"patch_size": 16, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
        special_names={"image_token": "<image>"},
    )


def _internvl() -> Subject:
    special = ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    text = _text("qwen2", 1e-6, special)
    vision = {**ENCODER, "model_type": "internvl_vision", "image_size": [48, 48], "patch_size": [PATCH, PATCH], "attention_bias": True}
    return Subject(
        "internvl",
        config={
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": _token(special, "<IMG_CONTEXT>"),
            "image_seq_length": 9,
            "downsample_ratio": 0.5,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": vision,
        },
        processor={
            **PIXELS,
            "crop_to_patches": True,
            "do_convert_rgb": True,
            "image_processor_type": "GotOcr2ImageProcessor",
            "max_patches": 4,
            "min_patches": 1,
            "resample": 3,
            "size": {"height": 48, "width": 48},
            "use_thumbnail": True,
        },
        special=special,
        image_text="<IMG_CONTEXT>",
        template=(
            "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
            "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}"
            "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        ),
        rows=9,
        classes=("InternVLProcessor", "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil"),
        options={"image_seq_length": 9},
        special_names={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


def _qwen2_vl() -> Subject:
    special = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    text = _text("qwen2_vl_text", 1e-6, special)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    return Subject(
        "qwen2_vl",
        config={
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "image_token_id": _token(special, "<|image_pad|>"),
            "video_token_id": _token(special, "<|video_pad|>"),
            "vision_start_token_id": _token(special, "<|vision_start|>"),
            "vision_end_token_id": _token(special, "<|vision_end|>"),
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": {
                "model_type": "qwen2_vl_vision",
                "depth": 2,
                "embed_dim": 48,
                "hidden_size": TEXT["hidden_size"],
                "mlp_ratio": 2,
                "num_heads": 4,
                "patch_size": PATCH,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        processor={
            **PIXELS,
            "do_convert_rgb": True,
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": 40 * 16 * 16,  # the first image has more
            "merge_size": 2,
            "min_pixels": 12 * 16 * 16,  # the second image has fewer
            "patch_size": PATCH,
            "resample": 3,
            "temporal_patch_size": 2,
        },
        special=special,
        image_text="<|image_pad|>",
        template=QWEN,
        rows=1,
        square=2 * PATCH,
        classes=("Qwen2VLProcessor", "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"),
        options={},
        special_names={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def _qwen2_5_vl() -> Subject:
    like = _qwen2_vl()
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "out_hidden_size": TEXT["hidden_size"],
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 48,  # 3 tokens
        "fullatt_block_indexes": [1],
    }
    changes = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": {**like.config["text_config"], "model_type": "qwen2_5_vl_text"},
        "vision_config": vision,
    }
    return replace(like, name="qwen2_5_vl", config={**like.config, **changes})


def _qwen3_vl() -> Subject:
    like = _qwen2_vl()
    text = {**like.config["text_config"], "model_type": "qwen3_vl_text", "head_dim": 16, "num_hidden_layers": 3}
    vision = {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "out_hidden_size": TEXT["hidden_size"],
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    changes = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": vision,
    }
    processor = {name: value for name, value in like.processor.items() if name not in ("min_pixels", "max_pixels")}
    size = {"shortest_edge": 12 * 16 * 16, "longest_edge": 40 * 16 * 16}
    return replace(like, name="qwen3_vl", config={**like.config, **changes}, processor={**processor, "size": size})


def _mistral3() -> Subject:
    special = ("<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    text = {**_text("mistral", 1e-5, special), "head_dim": 16, "sliding_window": None}
    return Subject(
        "mistral3",
        config={
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": _token(special, "[IMG]"),
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
            "vision_feature_layer": -1,
            "text_config": text,
            "vision_config": {
                **ENCODER,
                "model_type": "pixtral",
                "head_dim": 12,
                "hidden_act": "silu",
                "image_size": 96,
                "patch_size": PATCH,
            },
        },
        processor={
            **PIXELS,
            "do_convert_rgb": True,
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": PATCH, "width": PATCH},
            "resample": 3,
            "size": {"longest_edge": 96},  # the other edges of some images are rounded up
        },
        special=special,
        image_text="[IMG]",
        template=(
            "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]"
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for block in message['content'] %}"
            "{% if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] in ['image', 'image_url'] %}[IMG]{% endif %}"
            "{% endfor %}{% endif %}[/INST]{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
        ),
        rows=1,
        square=2 * PATCH,
        classes=("PixtralProcessor", "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil"),
        options={"patch_size": PATCH, "spatial_merge_size": 2},
        special_names={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    )


FIXED_SIZE = _idefics3(), _gemma3(), _llava(), _llava_siglip(), _internvl()
ANY_SIZE = _qwen2_vl(), _qwen2_5_vl(), _qwen3_vl(), _mistral3()
SUBJECTS = {subject.name: subject for subject in (*FIXED_SIZE, *ANY_SIZE)}
