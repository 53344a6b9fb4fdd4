"""Make the goldens of models that embed texts and images: small random models, and the vectors that transformers computes with them.

Install packages as for `make_vision.py`; then: V/bin/python -m tests.golden.make_joint [NAME...]

`golden.npz` of a model has, for each image, its crop in bytes (crop_N) and its vector (vector_N); and for each text its token ids with
padding (tokens_N) and its vector (text_N). Vectors are not normalised. `weights.json` says how its weights are drawn.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import numpy as np

from tests.golden.drawn import Draw, write_recipe
from tests.golden.filling import fill, tensors_of
from tests.golden.joint import SUBJECTS, TEXTS, Joint
from tests.golden.make_vision import parts_of, shown
from tests.golden.media import SIZES, picture


def tokenizer(subject: Joint) -> dict[str, Any]:
    """Return a byte-level tokenizer that puts special tokens around a text. As in files of the hub, it does not say how to pad."""
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    before, after = subject.around
    ids = {text: subject.tokens.index(text) for text in subject.special}

    def around(name: str) -> list[Any]:
        special = [[{"SpecialToken": {"id": text, "type_id": 0}} for text in part] for part in (before, after)]
        return [*special[0], {"Sequence": {"id": name, "type_id": 0}}, *special[1]]

    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": text, **fixed} for text, number in ids.items()],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": [*around("A"), *around("B")],
            "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in ids.items()},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(subject.tokens)}, "merges": []},
    }


def write_files(subject: Joint) -> None:
    """Write the files of a model beside its weights."""
    subject.place.mkdir(parents=True, exist_ok=True)
    parts = (("config", subject.config), ("preprocessor_config", subject.processor), ("tokenizer", tokenizer(subject)))
    fields = {"pad_token": subject.padding, "eos_token": subject.around[1][-1], "model_max_length": subject.length}
    for name, value in (*parts, ("tokenizer_config", fields)):
        (subject.place / f"{name}.json").write_text(json.dumps(value, indent=None if name == "tokenizer" else 2) + "\n")


def make(subject: Joint) -> None:
    import torch
    import transformers

    write_files(subject)
    config = transformers.AutoConfig.from_pretrained(subject.place)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tensors = tensors_of(model)
    draws = {name: drawn(name, tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        fill(tensors, draws, seed=0)
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(subject.place / "tokenizer.json"), pad_token=subject.padding)
    module, _, name = subject.cutter.rpartition(".")
    cutter = getattr(import_module(f"transformers.models.{module}"), name)
    options = {name: value for name, value in subject.processor.items() if name != "image_processor_type"}
    arrays: dict[str, Any] = {}
    for number in range(len(SIZES)):
        file = picture(number)
        plain = cutter(**{**options, "do_rescale": False, "do_normalize": False})([shown(file)], return_tensors="np")
        with torch.no_grad():
            vector = model.get_image_features(**cutter(**options)([shown(file)], return_tensors="pt")).pooler_output
        arrays[f"vector_{number}"] = vector[0].numpy()
        (crop,) = parts_of(plain) if subject.square else np.asarray(plain["pixel_values"]).transpose(0, 2, 3, 1)
        arrays[f"crop_{number}"] = crop.astype(np.uint8)
    for number, text in enumerate(TEXTS):
        padding = {"padding": "max_length", "max_length": subject.length} if subject.is_padded else {}
        ids = words([text], return_tensors="pt", **padding)["input_ids"]
        with torch.no_grad():
            vector = model.get_text_features(input_ids=ids).pooler_output
        arrays |= {f"tokens_{number}": ids[0].numpy().astype(np.int32), f"text_{number}": vector[0].numpy()}
    np.savez_compressed(subject.place / "golden.npz", **arrays)
    write_recipe(subject.place, 0, draws)
    print(subject.name, *(f"{name} {value.shape}" for name, value in arrays.items()), *tensors, sep="\n", flush=True)


def drawn(name: str, tensor: Any) -> Draw:
    """Describe how a tensor is drawn."""
    scale = 0.2 if tensor.ndim < 2 else 1.6 * tensor[0].numel() ** -0.5
    scale = 0.6 if ("embedd" in name and "patch" not in name) or "probe" in name else scale
    is_norm = "norm" in name or "layrnorm" in name
    return Draw(tuple(tensor.shape), round(scale, 4), 1.0 if is_norm and name.endswith("weight") else 0.0)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SUBJECTS:
        make(SUBJECTS[chosen])
