"""Small random vision models whose crops have any size."""

from __future__ import annotations

from dataclasses import replace

from tests.golden.vision_subject import ENCODER, LETTERS, PATCH, PIXELS, TEXT, Subject, text_of, token_of

QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LATER_ENCODER = {  # the encoder of Qwen2.5-VL and Qwen3-VL
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "out_hidden_size": TEXT["hidden_size"],
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _qwen2_vl() -> Subject:
    special = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    text = text_of("qwen2_vl_text", 1e-6, special)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    return Subject(
        "qwen2_vl",
        config={
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "image_token_id": token_of(special, "<|image_pad|>"),
            "video_token_id": token_of(special, "<|video_pad|>"),
            "vision_start_token_id": token_of(special, "<|vision_start|>"),
            "vision_end_token_id": token_of(special, "<|vision_end|>"),
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
        **LATER_ENCODER,
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
        **LATER_ENCODER,
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
    text = {**text_of("mistral", 1e-5, special), "head_dim": 16, "sliding_window": None}
    return Subject(
        "mistral3",
        config={
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "image_token_index": token_of(special, "[IMG]"),
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
        between="[IMG_BREAK]",
        square=2 * PATCH,
        classes=("PixtralProcessor", "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil"),
        options={"patch_size": PATCH, "spatial_merge_size": 2},
        special_names={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    )


def _pixtral() -> Subject:
    """Return the encoder of Mistral 3 in the layout of LLaVA. A token stands for each patch."""
    like = _mistral3()
    kept = {name: value for name, value in like.config.items() if name not in ("spatial_merge_size", "multimodal_projector_bias")}
    encoder = {**like.config["vision_config"], "hidden_act": "gelu"}
    changes = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": 1,
        "vision_feature_select_strategy": "full",
        "vision_config": encoder,
    }
    options = {"patch_size": PATCH, "spatial_merge_size": 1}
    processor = {**like.processor, "size": {"longest_edge": 50}}  # which is no multiple of a patch
    return replace(like, name="pixtral", config={**kept, **changes}, processor=processor, square=PATCH, options=options)


def _lfm2_vl() -> Subject:
    """Return LFM2-VL, which sees the large first image both whole and in parts. Along an edge, some crops have fewer patches than its table
    of positions has entries, and others more."""
    places = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 3) for column in range(1, 5)]
    special = ("<|startoftext|>", "<|im_end|>", "<|im_start|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *places)
    text = {**text_of("lfm2", 1e-5, special), "norm_eps": 1e-5, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
    del text["rms_norm_eps"]
    return Subject(
        "lfm2_vl",
        config={
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "model_type": "lfm2_vl",
            "image_token_id": token_of(special, "<image>"),
            "downsample_factor": 2,
            "projector_hidden_act": "gelu",
            "projector_hidden_size": 80,
            "tie_embedding": True,
            "text_config": {**text, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
            "vision_config": {
                **ENCODER,
                "model_type": "siglip2_vision_model",
                "num_patches": 36,
                "patch_size": PATCH,
                "vision_use_head": False,
            },
        },
        processor={
            **PIXELS,
            "do_convert_rgb": True,
            "do_image_splitting": True,
            "do_pad": True,
            "do_resize": False,  # as files of LFM2-VL say, whose processor resizes nevertheless
            "downsample_factor": 2,
            "encoder_patch_size": PATCH,
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "max_image_tokens": 40,
            "max_pixels_tolerance": 1.1,
            "max_tiles": 4,
            "min_image_tokens": 12,
            "min_tiles": 2,
            "resample": 2,
            "tile_size": 48,
            "use_thumbnail": True,
        },
        special=special,
        image_text="<image>",
        template=(
            "{{- bos_token -}}{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
            "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}{%- for item in message['content'] -%}"
            "{%- if item['type'] == 'image' -%}{{- '<image>' -}}{%- elif item['type'] == 'text' -%}{{- item['text'] -}}{%- endif -%}"
            "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
        ),
        rows=1,
        square=2 * PATCH,
        classes=("Lfm2VlProcessor", "lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor"),
        options={},
        special_names={"image_token": "<image>"},
    )


def _gemma4() -> Subject:
    """Return a small Gemma 4: with per-layer embeddings, keys and values that layers share, and ranges to which the encoder clips."""
    special = ("<bos>", "<turn|>", "<|turn>", "<|image|>", "<|image>", "<image|>", "<pad>")
    sizes = {"vocab_size": len(LETTERS) + len(special), "eos_token_id": len(LETTERS) + 1, "pad_token_id": token_of(special, "<pad>")}
    text = {
        **TEXT,
        **sizes,
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 80,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": len(LETTERS) + len(special),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    return Subject(
        "gemma4",
        config={
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "image_token_id": token_of(special, "<|image|>"),
            "boi_token_id": token_of(special, "<|image>"),
            "eoi_token_id": token_of(special, "<image|>"),
            "audio_config": None,
            "tie_word_embeddings": True,
            "text_config": text,
            "vision_config": {
                **ENCODER,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 4,
                "head_dim": 12,
                "patch_size": PATCH,
                "pooling_kernel_size": 2,
                "position_embedding_size": 160,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
                "use_clipped_linears": True,
            },
        },
        processor={
            "do_convert_rgb": True,
            "do_normalize": False,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.0, 0.0, 0.0],
            "image_processor_type": "Gemma4ImageProcessor",
            "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": 70,
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "resample": 3,
            "rescale_factor": 1 / 255,
        },
        special=special,
        image_text="<|image|>",
        template=(
            "{{ bos_token }}{%- for message in messages -%}{{ '<|turn>' + message['role'] + '\n' }}"
            "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
            "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<|image|>' }}"
            "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
            "{{ '<turn|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"
        ),
        rows=1,
        square=2 * PATCH,
        classes=("Gemma4Processor", "gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil"),
        options={},
        special_names={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
    )


def _gemma4_both_ways() -> Subject:
    """Return a model like the larger ones: tokens of an image attend to all of them in layers with a window, and patches are
    standardised."""
    like = _gemma4()
    text = {
        **like.config["text_config"],
        "use_bidirectional_attention": "vision",
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    encoder = {**like.config["vision_config"], "use_clipped_linears": False, "standardize": True}
    return replace(like, name="gemma4_both_ways", config={**like.config, "text_config": text, "vision_config": encoder})


def _glm4v() -> Subject:
    """Return a model whose table of positions has fewer entries than some crops have patches, and more than others."""
    special = ("<sop>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "[gMASK]")
    text = {**text_of("glm4v_text", 1e-5, special), "attention_bias": True}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
    like = _qwen2_vl()
    ids = {"image_token_id": "<|image|>", "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>"}
    processor = {name: value for name, value in like.processor.items() if name not in ("min_pixels", "max_pixels")}
    size = {"shortest_edge": 2 * 12 * 16 * 16, "longest_edge": 2 * 40 * 16 * 16}  # the pixels of both frames
    return replace(
        like,
        name="glm4v",
        config={
            "architectures": ["Glm4vForConditionalGeneration"],
            "model_type": "glm4v",
            **{name: token_of(special, token) for name, token in ids.items()},
            "video_token_id": token_of(special, "<|video|>"),
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": {
                "model_type": "glm4v_vision",
                **LATER_ENCODER,
                "depth": 2,
                "image_size": 6 * PATCH,
                "hidden_act": "silu",
                "attention_bias": False,
                "rms_norm_eps": 1e-5,
            },
        },
        processor={**processor, "image_processor_type": "Glm4vImageProcessor", "size": size},
        special=special,
        image_text="<|image|>",
        template=(
            "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n"
            "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
            "{% if item['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
            "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        ),
        classes=("Glm4vProcessor", "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil"),
        special_names={"image_token": "<|image|>", "video_token": "<|video|>"},
    )


def _glm4v_moe() -> Subject:
    """Return a GLM-4V with experts, whose queries and keys are rotated by halves."""
    like = _glm4v()
    experts = {
        "num_hidden_layers": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    text = {**like.config["text_config"], **experts, "model_type": "glm4v_moe_text", "head_dim": 16}
    changes = {"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "text_config": text}
    return replace(like, name="glm4v_moe", config={**like.config, **changes})


ANY_SIZE = (
    *(_qwen2_vl(), _qwen2_5_vl(), _qwen3_vl(), _mistral3(), _pixtral(), _lfm2_vl(), _gemma4(), _gemma4_both_ways()),
    *(_glm4v(), _glm4v_moe()),
)
