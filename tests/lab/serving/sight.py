"""`python -m tests.lab sight`: what an image of four megapixels costs a server: the time to the first token of the first and of the second
question about it, the speed of decoding after it, and the longest gap of another client's stream while it is encoded.

The model has the shape of SmolVLM 256M, except for its vocabulary, and random weights. It cuts the image into nine crops of 512 x 512
pixels and a small copy of the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import shutil
import statistics
import tempfile
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from deploy.bench.measure import Figure, report
from deploy.served import served
from deploy.streams import Stream, post_stream
from server.load_settings import MAX_GAP_MS
from server.models.state import ModelSpec
from tests.golden.vision import SUBJECTS

NAME = "sight"
SMALL = SUBJECTS["idefics3"]  # has the files of a model of this family, but small matrices
CONFIG: Mapping[str, Mapping[str, int]] = {
    "text_config": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
SCALE_FACTOR = 4  # patches along each edge that become one token
CROPS = 3  # along each edge of the image
# Map each size of the small model's matrices to the size in this model, by the prefix of the names of tensors.
SIZES = {
    "model.vision_model": {48: 768, 80: 3072, 36: 32**2, 8: 16},
    "model.connector": {64: 576, 192: 768 * SCALE_FACTOR**2},
    "model.text_model": {64: 576, 32: 192, 96: 1536},
    "lm_head": {64: 576},
}
EDGE = 2048  # pixels
NUM_NEW, NUM_BESIDE = 64, 600  # tokens of an answer, and of the other client's stream
SECOND_SHARE = 0.1  # goal: time to the first token of the second question, as a share of that of the first question
LETTERS = range(2, 54)  # tokens
QUESTIONS = ("What is this", "Is it red")


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round."""

    first_s: float  # to the first token of the first question about an image
    second_s: float  # to that of the second question about the same image
    seen_token_s: float  # per token that follows an image and a question
    read_token_s: float  # per token that follows a question without an image
    gap_s: float  # longest gap between two tokens of another client's stream while the image is encoded
    usual_gap_s: float  # median gap of that stream


def write_model(folder: Path) -> None:
    for file in SMALL.place.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(configuration()))
    processor = json.loads((SMALL.place / "preprocessor_config.json").read_text())
    crop = CONFIG["vision_config"]["image_size"]
    processor |= {"max_image_size": {"longest_edge": crop}, "size": {"longest_edge": CROPS * crop}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    random = np.random.default_rng(0)
    save_file({name: _drawn(random, *tensor) for name, tensor in tensors().items()}, folder / "model.safetensors")


def configuration() -> dict[str, Any]:
    config = json.loads((SMALL.place / "config.json").read_text())
    for part, fields in CONFIG.items():
        config[part] |= fields
    return {**config, "scale_factor": SCALE_FACTOR}


def tensors() -> dict[str, tuple[list[int], float]]:
    """Map the name of each tensor to its shape and to the number around which it is drawn."""
    found: dict[str, tuple[list[int], float]] = {}
    for name, (shape, _, shift) in json.loads((SMALL.place / "weights.json").read_text())["tensors"].items():
        sizes = next(sizes for prefix, sizes in SIZES.items() if name.startswith(prefix))
        large = [sizes.get(size, size) for size in shape]
        if ".layers.0." in name:
            part = "vision_config" if "vision" in name else "text_config"
            names = [name.replace(".layers.0.", f".layers.{layer}.") for layer in range(CONFIG[part]["num_hidden_layers"])]
        else:
            names = [] if ".layers." in name else [name]
        found |= dict.fromkeys(names, (large, shift))
    return found


def _drawn(random: np.random.Generator, shape: Sequence[int], shift: float) -> np.ndarray:
    scale = np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.02
    return (shift + random.standard_normal(shape, np.float32) * scale).astype(np.float16)


def picture(number: int) -> str:
    pixels = np.random.default_rng(number).integers(0, 256, (EDGE // 64, EDGE // 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((EDGE, EDGE)).save(file, "JPEG")
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"


async def ask(url: str, text: str, image: str | None = None) -> Stream:
    """Ask one question. Tokens are drawn, because the most probable ones of random weights may all be special ones without text."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return await follow(url, "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=NUM_NEW, seed=0)


async def follow(url: str, path: str, **body: Any) -> Stream:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    stream = Stream(time.perf_counter())
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async for event in post_stream(parts.hostname, parts.port, {"model": NAME, "ignore_eos": True, **body, **options}, path=path):
        stream.hear(event)
    return stream


async def run_round(url: str, number: int) -> Round:
    first = await ask(url, QUESTIONS[0], picture(2 * number))
    second = await ask(url, QUESTIONS[1], picture(2 * number))
    read = await ask(url, QUESTIONS[0])
    other = asyncio.create_task(asyncio.to_thread(_beside, url))
    await asyncio.sleep(1.0)  # the other stream decodes
    beside = await ask(url, QUESTIONS[0], picture(2 * number + 1))
    stream = await other
    pairs = zip(stream.times_s, stream.gaps_s, strict=False)
    during = [gap_s for at_s, gap_s in pairs if beside.began_s - gap_s < at_s < beside.times_s[0]]
    if not during or stream.times_s[-1] < beside.times_s[0]:
        raise RuntimeError(f"the other stream ended before the image was encoded; it needs more than {NUM_BESIDE} tokens")
    return Round(first.ttft_s, second.ttft_s, _per_token(second), _per_token(read), max(during), statistics.median(stream.gaps_s))


def _beside(url: str) -> Stream:
    """Stream letters: a token without text would arrive only with the next one that has text, and gaps would span several steps."""
    return asyncio.run(follow(url, "/v1/completions", prompt=[*range(3, 19)], max_tokens=NUM_BESIDE, allowed_token_ids=[*LETTERS]))


def _per_token(stream: Stream) -> float:
    return 1 / stream.decoding_rate


def figures_of(rounds: Sequence[Round]) -> list[Figure]:
    def middle(name: str) -> float:
        return statistics.median(getattr(one, name) for one in rounds)

    return [
        Figure("first token of the first question about an image", middle("first_s"), "s"),
        Figure(
            "time to the first token: second question about the image / first question",
            statistics.median(one.second_s / one.first_s for one in rounds),
            "x",
            SECOND_SHARE,
            note=f"{middle('second_s') * 1e3:.0f} ms",
        ),
        Figure(
            "time per token: after an image and a question / after the question without an image",
            statistics.median(one.seen_token_s / one.read_token_s for one in rounds),
            "x",
            note=f"{middle('seen_token_s') * 1e3:.2f} and {middle('read_token_s') * 1e3:.2f} ms; the image is {CROPS**2 + 1} x 64 tokens",
        ),
        Figure(
            "longest gap of another stream while an image is encoded",
            max(one.gap_s for one in rounds) * 1e3,
            "ms",
            MAX_GAP_MS,
            note=f"its median is {middle('usual_gap_s') * 1e3:.1f} ms",
        ),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab sight", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quantize", default="auto", help="format of the weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        write_model(Path(folder))
        with served(ModelSpec(NAME, folder, quantize=options.quantize)) as url:
            rounds = [asyncio.run(run_round(url, number)) for number in range(options.rounds + 1)]
    report(figures_of(rounds[1:]), as_json=options.json)  # the first round warms up
