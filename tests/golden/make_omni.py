"""Make the goldens of models that read images and audio: small random models, and what transformers computes with them, with the real
processor, from images and recordings of odd sizes.

python -m venv V; V/bin/pip install torch==2.13.0 torchvision==0.28.0 transformers==5.24.0 pillow==13.0.0
V/bin/python -m tests.golden.make_omni [NAME...]

`golden.npz` of a model has, for each image, its file (image_N), its only crop in bytes (crops_N) and the rows of that crop (seen_N); for
each recording, its samples (sound_N) and their rows (heard_N); and for each conversation the prompt as text and as token ids, the logits
that follow it, and the greedy continuation. The checkpoint has the names of that on the hub, where the thinker is one of three parts.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np

from tests.golden.continuing import continued
from tests.golden.listening import recording
from tests.golden.make_listening import fill
from tests.golden.make_vision import one_by_one, picture, shown, tokenizer, whole
from tests.golden.omni import AUDIO, CONVERSATIONS, IMAGE, SUBJECTS, TEXT, Subject
from tests.golden.vision_subject import SIZES

OF_IMAGES = ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "rescale_factor", "resample")
OF_SQUARES = ("max_pixels", "min_pixels", "merge_size", "patch_size", "temporal_patch_size")
CLASSES = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}  # beginnings of the names of classes of transformers
SPEAKING = {"qwen2_5_omni": ("talker", "token2wav"), "qwen3_omni_moe": ("talker", "code2wav")}  # parts beside the thinker
PREFIXES = {"model.language_model.": "thinker.model.", "model.": "thinker.", "lm_head.": "thinker.lm_head."}


def write_files(subject: Subject) -> dict[str, Any]:
    """Write the files of a model beside its weights. Return the fields of its tokenizer."""
    subject.folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("config", subject.config), ("preprocessor_config", subject.processor), ("tokenizer", tokenizer(subject))):
        (subject.folder / f"{name}.json").write_text(json.dumps(value, indent=None if name == "tokenizer" else 2) + "\n")
    fields = {"chat_template": subject.template, "eos_token": subject.special[1], "bos_token": subject.special[0]}
    (subject.folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return fields


def make(subject: Subject) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Cutter

    fields = write_files(subject)
    thinker = transformers.AutoConfig.from_pretrained(subject.folder).thinker_config
    family = CLASSES[subject.name]
    kind = getattr(transformers, f"{family}ThinkerForConditionalGeneration")
    model = kind._from_config(thinker, attn_implementation="eager", dtype=torch.float32).eval()
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(subject.folder / "tokenizer.json"), **fields, extra_special_tokens=dict(subject.special_names)
    )
    options = {name: subject.processor[name] for name in (*OF_IMAGES, *OF_SQUARES)}
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=subject.processor["chunk_length"])
    processor = getattr(transformers, f"{family}Processor")(
        Cutter(**options), transformers.Qwen2VLVideoProcessor(), extractor, words, chat_template=subject.template
    )
    files = [picture(number) for number in range(len(SIZES))]
    sounds = [recording(number, length) for number, length in enumerate(subject.lengths)]
    given = {IMAGE: [shown(file) for file in files], AUDIO: [sound.astype(np.float32) / 32_768 for sound in sounds]}
    arrays: dict[str, Any] = {}
    for seed in itertools.count():
        torch.manual_seed(seed)
        found: list[dict[str, Any]] = []
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                fill(name, parameter)
                if subject.name == "qwen3_omni_moe" and (".experts." in name or name.endswith("embed_tokens.weight")):
                    # Stacks of matrices; and with larger embeddings, its layers would decide little, and the text repeat itself.
                    parameter.normal_(0, 1.6 * parameter.shape[-1] ** -0.5)
            for parts in CONVERSATIONS:
                if (one := answered(subject, model, processor, parts, given)) is None:
                    break
                found.append(one)
        if len(found) == len(CONVERSATIONS):
            break
        print(f"seed {seed}: {len(found)} conversations", flush=True)
    plain = Cutter(**{**options, "do_rescale": False, "do_normalize": False})
    for number, (file, image) in enumerate(zip(files, given[IMAGE], strict=True)):
        crop = whole(subject, plain([[image]], return_tensors="np"))[0].transpose(1, 2, 0).astype(np.uint8)
        with torch.no_grad():
            features = model.get_image_features(**processor.image_processor([[image]], return_tensors="pt"))
        depths = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        seen = np.concatenate([rows.numpy() for rows, *_ in depths], axis=1)
        arrays |= {f"image_{number}": np.frombuffer(file, np.uint8), f"crops_{number}": crop, f"seen_{number}": seen}
    for number, (sound, samples) in enumerate(zip(sounds, given[AUDIO], strict=True)):
        inputs = processor(text=subject.special_names["audio_token"], audio=[samples], return_tensors="pt")
        features = {name: inputs[name] for name in ("input_features", "feature_attention_mask")}
        with torch.no_grad():
            heard = model.get_audio_features(**features).last_hidden_state.numpy()
        arrays |= {f"sound_{number}": sound, f"heard_{number}": heard}
    for number, one in enumerate(found):
        arrays |= {f"{name}_{number}": value for name, value in one.items()}
    np.savez_compressed(subject.folder / "golden.npz", **arrays)
    stored = one_by_one(model.state_dict())
    tensors = {named(name): tensor.contiguous().clone() for name, tensor in stored.items()}
    others = {f"{part}.proj.weight": torch.ones(2, 3) for part in SPEAKING[subject.name]}
    save_file({**tensors, **others}, subject.folder / "model.safetensors", metadata={"format": "pt"})
    print(subject.name, f"seed {seed}", *(f"{name} {value.shape}" for name, value in arrays.items()), *tensors, sep="\n")


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
        """Drawn tokens follow each other, whatever they are, as when transformers generates."""
        drawn = int(places.max()) + 1 + torch.arange(len(ids) - every.shape[1])
        positions = torch.cat([places, drawn.expand(3, 1, -1)], dim=2)
        every_id = torch.tensor([ids])
        found = model(input_ids=every_id, attention_mask=torch.ones_like(every_id), position_ids=positions, use_cache=False, **others)
        return found.logits[0, -1].numpy()

    return continued(prompt, ids, row_of, (subject.image, subject.audio))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SUBJECTS:
        make(SUBJECTS[chosen])
