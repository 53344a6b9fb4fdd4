"""Make the goldens of vision models: small random models, and what transformers computes with them from images of odd sizes.

python -m venv V; V/bin/pip install torch==2.13.0 transformers==5.24.0 pillow==13.0.0; V/bin/python -m tests.golden.make_vision [NAME...]

LFM2-VL and Llama 4 also need torchvision==0.28.0. The image processor of Llama 4 rounds pixels to 16 bits, which is left out here.

`golden.npz` of a model has, for each image, its crops in bytes (crops_N, and whole_N if the crop of the whole image has another size) and
their rows (rows_N); and for each conversation the prompt as text and as token ids, the logits that follow it, and the greedy continuation.
`weights.json` says how its weights are drawn.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
from importlib import import_module
from typing import Any

import numpy as np

from tests.golden.continuing import continued
from tests.golden.drawn import Draw, write_recipe
from tests.golden.filling import as_it_is, fill, one_by_one, tensors_of
from tests.golden.media import SIZES, picture
from tests.golden.vision import SUBJECTS
from tests.golden.vision_subject import CONVERSATIONS, PATCH, Subject

FEATURES = (
    "pixel_values",
    "image_grid_thw",
    "image_sizes",
    "spatial_shapes",
    "image_position_ids",
)  # what image processors give to the encoder
MASK = "pixel_attention_mask"


def tokenizer(subject: Subject) -> dict[str, Any]:
    fixed = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": subject.tokens.index(text), "content": text, **fixed} for text in subject.special]
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(subject.tokens)}, "merges": []},
    }


def shown(file: bytes) -> Any:
    """Return the image as the model sees it: transparent places are white."""
    from PIL import Image

    image = Image.open(io.BytesIO(file)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def write_files(subject: Subject) -> dict[str, Any]:
    """Write the files of a model beside its weights. Return the fields of its tokenizer."""
    subject.place.mkdir(parents=True, exist_ok=True)
    parts = (("config", subject.config), ("preprocessor_config", subject.processor), ("tokenizer", tokenizer(subject)))
    for name, value in parts:
        (subject.place / f"{name}.json").write_text(json.dumps(value, indent=None if name == "tokenizer" else 2) + "\n")
    fields = {"chat_template": subject.template, "eos_token": subject.special[1], "bos_token": subject.special[0]}
    (subject.place / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return fields


def make(subject: Subject) -> None:
    import torch
    import transformers

    fields = write_files(subject)
    config = transformers.AutoConfig.from_pretrained(subject.place)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    special = {"extra_special_tokens": dict(subject.special_names)} if subject.special_names else {}
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(subject.place / "tokenizer.json"), **fields, **special)
    module, _, name = subject.classes[1].rpartition(".")
    cutter = getattr(import_module(f"transformers.models.{module}"), name)
    options = {name: value for name, value in subject.processor.items() if name != "image_processor_type"}
    is_qwen = "merge_size" in subject.processor
    is_mixed, is_gemma4 = subject.name == "lfm2_vl", subject.config["model_type"] == "gemma4"
    if subject.any_size and not is_qwen and not is_mixed and not is_gemma4:
        options["patch_size"] = {"height": subject.square, "width": subject.square}  # as PixtralProcessor asks for
    images = cutter(**options)
    if subject.name == "llama4":
        images.rescale_and_normalize = cutter.__mro__[1].rescale_and_normalize.__get__(images)
        # The model reads this attribute of its decoder's results, which have none in this version of transformers.
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    if is_mixed:
        processor = transformers.Lfm2VlProcessor(images, words, chat_template=subject.template)
    elif subject.any_size:
        processor = AnySizeProcessor(subject, images, words)
    elif subject.name == "internvl":
        processor = InternProcessor(subject, images, words)
    else:
        processor = getattr(transformers, subject.classes[0])(images, words, chat_template=subject.template, **subject.options)
    files = [picture(number) for number in range(len(SIZES))]
    arrays: dict[str, Any] = {}
    tensors = tensors_of(model)
    tensors = one_by_one(tensors) if subject.name == "glm4v_moe" else tensors
    draws = draws_of(subject, model, tensors)
    for seed in itertools.count():
        with torch.no_grad():
            fill(tensors, draws, seed)
            found: list[dict[str, Any]] = []
            for text, numbers in CONVERSATIONS:
                if (one := answered(subject, model, processor, text, [shown(files[number]) for number in numbers])) is None:
                    break
                found.append(one)
        if len(found) == len(CONVERSATIONS):
            break
    for number, file in enumerate(files):
        plain = cutter(**{**options, "do_rescale": False, "do_normalize": False})
        given = plain([[shown(file)]], return_tensors="np")
        if is_gemma4:
            arrays[f"crops_{number}"] = np.stack(parts_of({**given, "spatial_shapes": shapes_of(given)}))
        elif is_mixed:
            *others, last = parts_of(given)
            arrays[f"crops_{number}"] = np.stack(others) if others else last[None]
            arrays |= {f"whole_{number}": last} if others else {}
        else:
            crops = whole(subject, given) if is_qwen else np.asarray(given["pixel_values"])
            arrays[f"crops_{number}"] = crops.reshape(-1, *crops.shape[-3:]).transpose(0, 2, 3, 1).astype(np.uint8)
        pixels = images([[shown(file)]], return_tensors="pt")
        with torch.no_grad():
            wanted = (*FEATURES, MASK) if is_mixed else FEATURES
            seer = model if subject.name == "llama4" else model.model
            features = seer.get_image_features(**{name: pixels[name] for name in wanted if name in pixels})
            if subject.name == "llama4":
                features.pooler_output = model.multi_modal_projector(features.last_hidden_state)
        depths = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        rows = [np.concatenate([one.reshape(-1, one.shape[-1]).numpy() for one in depth]) for depth in depths]
        arrays[f"rows_{number}"] = np.concatenate(rows, axis=1)
    for number, one in enumerate(found):
        arrays |= {f"{name}_{number}": value for name, value in one.items()}
    np.savez_compressed(subject.place / "golden.npz", **arrays)
    write_recipe(subject.place, seed, draws)
    print(subject.name, f"seed {seed}", *(f"{name} {value.shape}" for name, value in arrays.items()), *tensors, sep="\n", flush=True)


class InternProcessor:
    """Does what `InternVLProcessor` does with images. That one needs torchvision, for videos."""

    def __init__(self, subject: Subject, images: Any, words: Any) -> None:
        self.subject, self.images, self.words = subject, images, words

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        return self.words.apply_chat_template(messages, tokenize=False, **options)

    def __call__(self, text: str, images: list[Any] | None, **_: Any) -> dict[str, Any]:
        import torch

        pieces, found = text.split(self.subject.image_text), pieces_of(self.images, images[0] if images else [])
        for number, pixels in enumerate(found):
            tokens = self.subject.image_text * (self.subject.rows * len(pixels))
            pieces[number + 1] = f"<img>{tokens}</img>{pieces[number + 1]}"
        ids = self.words("".join(pieces), return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, **({"pixel_values": torch.cat(found)} if found else {})}


class AnySizeProcessor:
    """Does what `Qwen2VLProcessor` and `PixtralProcessor` do with images. Those need torchvision."""

    def __init__(self, subject: Subject, images: Any, words: Any) -> None:
        self.subject, self.images, self.words = subject, images, words

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        return self.words.apply_chat_template(messages, tokenize=False, **options)

    def __call__(self, text: str, images: list[Any] | None, **_: Any) -> dict[str, Any]:
        first, *pieces = text.split(self.subject.image_text)
        given = self.images(images, return_tensors="pt") if images else {}
        counts = [int(grid.prod()) // self.subject.processor["merge_size"] ** 2 for grid in given.get("image_grid_thw", ())]
        if "num_soft_tokens_per_image" in given:
            begin, end = (self.subject.special_names[f"{name}_token"] for name in ("boi", "eoi"))
            shown = [f"{begin}{self.subject.image_text * int(count)}{end}" for count in given["num_soft_tokens_per_image"]]
            whole = first + "".join(one + piece for one, piece in zip(shown, pieces, strict=True))
            return {"input_ids": self.words(whole, return_tensors="pt", add_special_tokens=False)["input_ids"], **given}
        shown = [self.subject.image_text * count for count in counts] or [self.rows(*size) for size in given.get("image_sizes", ())]
        whole = first + "".join(one + piece for one, piece in zip(shown, pieces, strict=True))
        return {"input_ids": self.words(whole, return_tensors="pt", add_special_tokens=False)["input_ids"], **given}

    def rows(self, height: int, width: int) -> str:
        """Return the tokens of an image of Pixtral."""
        row = self.subject.image_text * (width // self.subject.square)
        return "[IMG_BREAK]".join([row] * (height // self.subject.square)) + "[IMG_END]"


def whole(subject: Subject, given: Any) -> Any:
    """Return the image whose patches an image processor gives, [1, colours, height, width]."""
    ((_, rows, columns),) = given["image_grid_thw"]
    patch, merge = subject.processor["patch_size"], subject.processor["merge_size"]
    parts = np.asarray(given["pixel_values"]).reshape(rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)[:, :, :, :, :, 0]
    return parts.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * patch, columns * patch)


def parts_of(given: Any) -> list[Any]:
    """Return the crops whose patches the image processor of LFM2-VL gives, each [height, width, colours]."""
    shapes = [(int(rows), int(columns)) for rows, columns in given["spatial_shapes"]]
    found = [np.asarray(crop)[: rows * columns] for crop, (rows, columns) in zip(given["pixel_values"], shapes, strict=True)]
    cut = [crop.reshape(*shape, PATCH, PATCH, 3).transpose(0, 2, 1, 3, 4) for crop, shape in zip(found, shapes, strict=True)]
    return [crop.reshape(crop.shape[0] * PATCH, -1, 3).astype(np.uint8) for crop in cut]


def shapes_of(given: Any) -> list[tuple[int, int]]:
    """Return the rows and columns of the patches that the image processor of Gemma 4 gives."""
    return [(int(places[:, 1].max()) + 1, int(places[:, 0].max()) + 1) for places in given["image_position_ids"]]


def pieces_of(cutter: Any, pictures: list[Any]) -> list[Any]:
    return [cutter([[picture]], return_tensors="pt")["pixel_values"] for picture in pictures]


def draws_of(subject: Subject, model: Any, tensors: dict[str, Any]) -> dict[str, Draw]:
    """Describe how the tensors of a model are drawn."""
    buffers = {name for name, _ in model.named_buffers()}
    return {name: _range(name, tensor) if name in buffers else _drawn(subject, name, tensor) for name, tensor in tensors.items()}


def _drawn(subject: Subject, name: str, tensor: Any) -> Draw:
    scale = 0.2 if tensor.ndim == 1 else 1.6 * tensor[0].numel() ** -0.5
    scale = 0.6 if ("embedd" in name and "patch" not in name) or "position_embedding_table" in name else scale
    if subject.name.startswith("gemma") and name.endswith("embed_tokens.weight"):
        scale /= tensor.shape[1] ** 0.5  # Gemma scales embeddings; large ones would outweigh the layers, and the text repeat itself
    is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
    adds_one = subject.name == "gemma3" and tensor.ndim == 1 and "vision_tower" not in name  # norms of Gemma add 1 to their weights
    return Draw(tuple(tensor.shape), round(scale, 4), 1.0 if is_norm and not adds_one else 0.0)


def _range(name: str, buffer: Any) -> Draw:
    """Describe a buffer of a checkpoint: a range to which the encoder of Gemma 4 clips, or what standardises its results."""
    shape, kind = tuple(buffer.shape), name.rpartition(".")[2]
    if kind in ("input_min", "output_min", "input_max", "output_max"):
        return Draw(shape, 0.2, -1.5 if kind.endswith("min") else 1.5)
    return Draw(shape, 0.2, float(kind == "std_scale")) if kind in ("std_bias", "std_scale") else as_it_is(name, buffer)


def answered(subject: Subject, model: Any, processor: Any, text: str, pictures: list[Any]) -> dict[str, Any] | None:
    """Return a conversation and its continuation, or None if two logits are nearly equal or the text repeats itself."""
    import torch

    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    given = processor(text=prompt, images=[pictures] if pictures else None, return_tensors="pt", add_special_tokens=False)
    ids = given["input_ids"][0].tolist()
    pixels = {name: given[name] for name in (*FEATURES, MASK) if name in given}
    kind, is_qwen = subject.config["model_type"], "merge_size" in subject.processor
    which = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids" if is_qwen or kind == "gemma4" else ""

    def row_of(ids: list[int]) -> Any:
        types = {which: (torch.tensor([ids]) == subject.image).long()} if which else {}
        return model(input_ids=torch.tensor([ids]), use_cache=False, **pixels, **types).logits[0, -1].numpy()

    return continued(prompt, ids, row_of, (subject.image,))


if __name__ == "__main__":
    for chosen in sys.argv[1:] or SUBJECTS:
        make(SUBJECTS[chosen])
