"""Small random vision models whose crops have one size, and a list of those and of others (`vision_any_size.py`)."""

from __future__ import annotations

from tests.golden.vision_any_size import ANY_SIZE
from tests.golden.vision_subject import ENCODER, LETTERS, PATCH, PIXELS, TEXT, Subject, text_of, token_of


def _idefics3() -> Subject:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    special = ("<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *places)
    text = text_of("llama", 1e-5, special)
    return Subject(
        "idefics3",
        config={
            "architectures": ["Idefics3ForConditionalGeneration"],
            "model_type": "idefics3",
            "image_token_id": token_of(special, "<image>"),
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
            "image_token_index": token_of(special, "<image_soft_token>"),
            "boi_token_index": token_of(special, "<start_of_image>"),
            "eoi_token_index": token_of(special, "<end_of_image>"),
            "eos_token_id": token_of(special, "<end_of_turn>"),
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
                "eos_token_id": token_of(special, "<end_of_turn>"),
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


def _llava() -> Subject:
    special = ("<s>", "</s>", "<image>")
    text = text_of("llama", 1e-5, special)
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
            "image_token_index": token_of(special, "<image>"),
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
    text = text_of("qwen2", 1e-6, special)
    return Subject(
        "llava_siglip",
        config={
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": token_of(special, "<image>"),
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
    text = text_of("qwen2", 1e-6, special)
    vision = {**ENCODER, "model_type": "internvl_vision", "image_size": [48, 48], "patch_size": [PATCH, PATCH], "attention_bias": True}
    return Subject(
        "internvl",
        config={
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "image_token_id": token_of(special, "<IMG_CONTEXT>"),
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


def _llama4() -> Subject:
    """Return a model that sees the first image on a canvas of several crops. Chunks of its attention end within images."""
    image = ("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    special = ("<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>", *image)
    text = {
        **text_of("llama4_text", 1e-5, special),
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 0, 1],
        "attention_chunk_size": 32,
    }
    sizes = {"projector_input_dim": 80, "projector_output_dim": 80, "vision_output_dim": 80, "intermediate_size": 4 * 48}
    return Subject(
        "llama4",
        config={
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "boi_token_index": token_of(special, "<|image_start|>"),
            "eoi_token_index": token_of(special, "<|image_end|>"),
            "image_token_index": token_of(special, "<|patch|>"),
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": {**ENCODER, **sizes, "model_type": "llama4_vision_model", "image_size": 48, "patch_size": PATCH},
        },
        processor={
            **PIXELS,
            "do_convert_rgb": True,
            "image_processor_type": "Llama4ImageProcessorFast",
            "max_patches": 6,
            "resample": 2,
            "resize_to_max_canvas": False,
            "size": {"height": 48, "width": 48},
        },
        special=special,
        image_text="<|patch|>",
        template=(
            "{{- bos_token }}{%- for message in messages %}{{- '<|header_start|>' + message['role'] + '<|header_end|>\n\n' }}"
            "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for content in message['content'] %}"
            "{%- if content['type'] == 'image' %}{{- '<|image|>' }}{%- elif content['type'] == 'text' %}{{- content['text'] | trim }}"
            "{%- endif %}{%- endfor %}{%- endif %}{{- '<|eot|>' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\n\n' }}{%- endif %}"
        ),
        rows=9,
        classes=("Llama4Processor", "llama4.image_processing_llama4.Llama4ImageProcessor"),
        options={"patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        special_names={},
    )


SUBJECTS = {subject.name: subject for subject in (_idefics3(), _gemma3(), _llava(), _llava_siglip(), _internvl(), _llama4(), *ANY_SIZE)}
