"""Make the goldens of models that read images and audio: small random models, and what transformers computes with them, with the real
processor, from images and recordings of odd sizes.

python -m venv V; V/bin/pip install torch==2.13.0 torchvision==0.28.0 transformers==5.24.0 pillow==13.0.0
V/bin/python -m tests.golden.make_omni [NAME...]

`golden.npz` of a model has, for each image, its only crop in bytes (crops_N) and the rows of that crop (seen_N); for each recording, its
rows (heard_N); and for each conversation the prompt as text and as token ids, the logits that follow it, and the greedy continuation.
`weights.json` says how its weights are drawn, with the names of the checkpoint on the hub, where the thinker is one of three parts.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from tests.golden.continuing import continued
from tests.golden.drawn import Draw, write_recipe
from tests.golden.filling import fill, one_by_one, tensors_of
from tests.golden.make_listening import drawn
from tests.golden.make_vision import shown, whole, write_files
from tests.golden.media import SIZES, picture
from tests.golden.omni import AUDIO, CONVERSATIONS, IMAGE, SUBJECTS, TEXT, Subject

OF_IMAGES = ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "rescale_factor", "resample")
OF_SQUARES = ("max_pixels", "min_pixels", "merge_size", "patch_size", "temporal_patch_size")
CLASSES = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}  # beginnings of the names of classes of transformers
SPEAKING = {"qwen2_5_omni": ("talker", "token2wav"), "qwen3_omni_moe": ("talker", "code2wav")}  # parts beside the thinker
PREFIXES = {"model.language_model.": "thinker.model.", "model.": "thinker.", "lm_head.": "thinker.lm_head."}


def make(subject: Subject) -> None:
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Cutter

    fields = write_files(subject)
    thinker = transformers.AutoConfig.from_pretrained(subject.place).thinker_config
    family = CLASSES[subject.name]
    kind = getattr(transformers, f"{family}ThinkerForConditionalGeneration")
    model = kind._from_config(thinker, attn_implementation="eager", dtype=torch.float32).eval()
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(subject.place / "tokenizer.json"), **fields, extra_special_tokens=dict(subject.special_names)
    )
    options = {name: subject.processor[name] for name in (*OF_IMAGES, *OF_SQUARES)}
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=subject.processor["chunk_length"])
    processor = getattr(transformers, f"{family}Processor")(
        Cutter(**options), transformers.Qwen2VLVideoProcessor(), extractor, words, chat_template=subject.template
    )
    files = [picture(number) for number in range(len(SIZES))]
    sounds = [subject.sound(number) for number in range(len(subject.lengths))]
    given = {IMAGE: [shown(file) for file in files], AUDIO: [sound.astype(np.float32) / 32_768 for sound in sounds]}
    arrays: dict[str, Any] = {}
    tensors = {named(name): tensor for name, tensor in one_by_one(tensors_of(model)).items()}
    draws = {name: drawn_of(name, tensor) for name, tensor in tensors.items()}
    for seed in itertools.count():
        found: dict[int, dict[str, Any]] = {}
        with torch.no_grad():
            fill(tensors, draws, seed)
            for number in reversed(range(len(CONVERSATIONS))):  # those that take least time come last
                if (one := answered(subject, model, processor, CONVERSATIONS[number], given)) is None:
                    break
                found[number] = one
        if len(found) == len(CONVERSATIONS):
            break
        print(f"seed {seed}: {len(found)} conversations", flush=True)
    plain = Cutter(**{**options, "do_rescale": False, "do_normalize": False})
    for number, image in enumerate(given[IMAGE]):
        crop = whole(subject, plain([[image]], return_tensors="np"))[0].transpose(1, 2, 0).astype(np.uint8)
        with torch.no_grad():
            features = model.get_image_features(**processor.image_processor([[image]], return_tensors="pt"))
        depths = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        seen = np.concatenate([rows.numpy() for rows, *_ in depths], axis=1)
        arrays |= {f"crops_{number}": crop, f"seen_{number}": seen}
    for number, samples in enumerate(given[AUDIO]):
        inputs = processor(text=subject.special_names["audio_token"], audio=[samples], return_tensors="pt")
        features = {name: inputs[name] for name in ("input_features", "feature_attention_mask")}
        with torch.no_grad():
            heard = model.get_audio_features(**features).last_hidden_state.numpy()
        arrays[f"heard_{number}"] = heard
    for number, one in sorted(found.items()):
        arrays |= {f"{name}_{number}": value for name, value in one.items()}
    np.savez_compressed(subject.place / "golden.npz", **arrays)
    others = {f"{part}.proj.weight": Draw((2, 3), 0.0, 1.0) for part in SPEAKING[subject.name]}
    write_recipe(subject.place, seed, {**draws, **others})
    print(subject.name, f"seed {seed}", *(f"{name} {value.shape}" for name, value in arrays.items()), *tensors, sep="\n", flush=True)


def drawn_of(name: str, tensor: Any) -> Draw:
    """Describe how a tensor is drawn. With larger embeddings, the layers would decide little, and the text repeat itself."""
    found = drawn(name, tensor)
    return replace(found, scale=round(1.6 * tensor.shape[-1] ** -0.5, 4)) if name.endswith("embed_tokens.weight") else found


def named(name: str) -> str:
    """Return the name of a tensor in checkpoints on the hub."""
    before = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    return PREFIXES[before] + name.removeprefix(before)


def answered(subject: Subject, model: Any, processor: Any, parts: Any, given: dict[str, list[Any]]) -> dict[str, Any] | None:
    """Return a conversation and its continuation, or None if another seed is needed."""
    import torch

    content = [{"type": kind, "text": value} if kind == TEXT else {"type": kind} for kind, value in parts]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    media = {name: [given[kind][value] for own, value in parts if own == kind] for name, kind in (("images", IMAGE), ("audio", AUDIO))}
    inputs = processor(text=prompt, **{name: found or None for name, found in media.items()}, return_tensors="pt")
    ids = inputs.pop("input_ids")[0].tolist()
    others = {name: inputs[name] for name in inputs if name not in ("attention_mask", "token_type_ids", "mm_token_type_ids")}
    every = torch.tensor([ids])
    mask, lengths = torch.ones_like(every), others["feature_attention_mask"].sum(-1) if "feature_attention_mask" in others else None
    places, _ = model.model.get_rope_index(every, others.get("image_grid_thw"), None, mask, audio_seqlens=lengths)

    def row_of(ids: list[int]) -> Any:
        """Return the logits after the last of the ids. Generated tokens have positions one after another, even if they are tokens of images
        or audio, as when transformers generates."""
        drawn = int(places.max()) + 1 + torch.arange(len(ids) - every.shape[1])
        positions = torch.cat([places, drawn.expand(3, 1, -1)], dim=2)
        every_id = torch.tensor([ids])
        found = model(input_ids=every_id, attention_mask=torch.ones_like(every_id), position_ids=positions, use_cache=False, **others)
        return found.logits[0, -1].numpy()

    return continued(prompt, ids, row_of, (subject.image, subject.audio))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SUBJECTS:
        make(SUBJECTS[chosen])
