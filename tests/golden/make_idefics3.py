"""Make the golden vision model: a small random Idefics3 (SmolVLM), and what transformers computes with it from images of odd sizes.

python -m venv V; V/bin/pip install torch==2.13.0 transformers==5.24.0 pillow==13.0.0; V/bin/python tests/golden/make_idefics3.py

`golden.npz` has, for each image, its file (image_N), its crops in bytes (crops_N) and their rows (rows_N); and for each conversation the
prompt as text and as token ids, the logits of its last token, and the greedy continuation. The first file is not square, the second is
smaller than a crop, the third is transparent in places.
"""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "idefics3"
CROP, PATCH, SHUFFLE, LONGEST = 48, 8, 2, 144
ROWS = (CROP // PATCH // SHUFFLE) ** 2
LETTERS = "ĠĊabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:;-_'\"()[]{}<>/|=+*#"  # byte-level BPE writes a space as Ġ
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *PLACES]
TOKENS = [*LETTERS, *SPECIAL]
IMAGE = TOKENS.index("<image>")
SIZES = ((200, 61), (37, 41), (75, 130))  # width and height
CONVERSATIONS = (("What is it?", [0]), ("Compare.", [1, 2]), ("Hello!", []))  # a text, and the images before it
CONTINUATION = 32
MIN_MARGIN = 1e-3  # least gap between the two largest logits, relative to the spread of all
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)  # that of SmolVLM
CONFIG: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": IMAGE,
    "scale_factor": SHUFFLE,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "text_config": {
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": TOKENS.index("<end_of_utterance>"),
    },
    "vision_config": {
        "model_type": "idefics3",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": CROP,
        "patch_size": PATCH,
    },
}
PROCESSOR = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
    "image_processor_type": "Idefics3ImageProcessor",
    "max_image_size": {"longest_edge": CROP},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": LONGEST},
}


def tokenizer() -> dict[str, Any]:
    special = [
        {
            "id": TOKENS.index(text),
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text in SPECIAL
    ]
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(TOKENS)}, "merges": []},
    }


def picture(number: int) -> bytes:
    """Return a file with smooth colours and some noise."""
    from PIL import Image

    width, height = SIZES[number]
    random = np.random.default_rng(number)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 90 * np.sin(x / random.uniform(5, 30) + y / random.uniform(5, 30) + random.uniform(0, 6)) for _ in range(3)]
    pixels = np.clip(np.stack(waves, axis=-1) + random.normal(0, 20, (height, width, 3)), 0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    if number == 2:
        image.putalpha(Image.fromarray(np.where((x + y) % 50 < 20, 0, 255).astype(np.uint8)))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def shown(file: bytes) -> Any:
    """Return the image as the model sees it: transparent places are white."""
    from PIL import Image

    image = Image.open(io.BytesIO(file)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def main() -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText, Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    FOLDER.mkdir(exist_ok=True)
    for name, value in (("config", CONFIG), ("preprocessor_config", PROCESSOR), ("tokenizer", tokenizer())):
        (FOLDER / f"{name}.json").write_text(json.dumps(value, indent=None if name == "tokenizer" else 2) + "\n")
    text_config = {"chat_template": TEMPLATE, "eos_token": "<end_of_utterance>", "bos_token": "<|im_start|>"}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(text_config, indent=2) + "\n")

    config = AutoConfig.from_pretrained(FOLDER)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    words = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"), **text_config)
    options = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    images = Idefics3ImageProcessorPil(**options)
    processor = Idefics3Processor(images, words, image_seq_len=ROWS, chat_template=TEMPLATE)
    files = [picture(number) for number in range(len(SIZES))]
    arrays: dict[str, Any] = {}
    for seed in itertools.count():
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale = 0.2 if parameter.ndim == 1 else 1.6 * parameter[0].numel() ** -0.5
                scale = 0.6 if "embedd" in name and "patch" not in name else scale
                parameter.normal_(0, scale).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            found = [answered(model, processor, text, [shown(files[number]) for number in numbers]) for text, numbers in CONVERSATIONS]
        if all(one is not None for one in found):
            break
    for number, file in enumerate(files):
        arrays[f"image_{number}"] = np.frombuffer(file, np.uint8)
        plain = Idefics3ImageProcessorPil(**{**options, "do_rescale": False, "do_normalize": False})
        crops = plain([[shown(file)]], return_tensors="np")["pixel_values"][0]
        arrays[f"crops_{number}"] = crops.transpose(0, 2, 3, 1).astype(np.uint8)
        pixels = images([[shown(file)]], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            features = model.model.get_image_features(pixels)
        arrays[f"rows_{number}"] = np.concatenate([one.reshape(-1, one.shape[-1]).numpy() for one in features.pooler_output])
    for number, one in enumerate(found):
        assert one is not None
        arrays |= {f"{name}_{number}": value for name, value in one.items()}
    np.savez_compressed(FOLDER / "golden.npz", **arrays)
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    print(f"seed {seed}", *(str(value.shape) for value in arrays.values()), *tensors, sep="\n")


def answered(model: Any, processor: Any, text: str, pictures: list[Any]) -> dict[str, Any] | None:
    """Return a conversation and its continuation, or None if two logits are nearly equal or the text repeats itself."""
    import torch

    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    given = processor(text=prompt, images=[pictures] if pictures else None, return_tensors="pt", add_special_tokens=False)
    ids = given["input_ids"][0].tolist()
    pixels = {name: given[name] for name in ("pixel_values", "pixel_attention_mask") if name in given}
    prompt_ids, rows = list(ids), []
    for _ in range(CONTINUATION):
        row = model(input_ids=torch.tensor([ids]), use_cache=False, **pixels).logits[0, -1].numpy()
        second, first = np.sort(row)[-2:]
        if first - second < MIN_MARGIN * row.std() or row.argmax() == IMAGE:
            return None
        rows.append(row)
        ids.append(int(row.argmax()))
    continuation = ids[len(prompt_ids) :]
    if len(set(continuation)) < 8:
        return None
    return {"text": np.array(prompt), "prompt": np.int32(prompt_ids), "logits": np.stack(rows), "continuation": np.int32(continuation)}


if __name__ == "__main__":
    main()
