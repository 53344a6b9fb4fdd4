"""Make the golden speech model: a small random Whisper in CTranslate2's format, and what CTranslate2 and faster-whisper compute with it.

python -m venv V; V/bin/pip install ctranslate2==4.8.5 faster-whisper==1.2.1; V/bin/python tests/golden/make_whisper.py
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "whisper"
SIZE, HEADS, LAYERS, FFN, VOCAB, FRAMES, CONTEXT, MELS = 32, 2, 2, 64, 60, 24, 32, 80
LETTERS = "Ġabcdefghijklmnopqrstuvwxyz0123456789.,!?-':;()[]<"  # byte-level BPE writes a space as Ġ
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|startofprev|>", "<|nospeech|>"]
TOKENS = [*LETTERS, *SPECIAL, "<|notimestamps|>", "<|0.00|>", "<|0.02|>"]
PROMPT = [51, 52, 53, 57]
TEXT = [3, 27, 42, 8, 15, 33, 5, 20, 11, 46]  # whose tokens are aligned with the audio
TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}


def variables() -> dict[str, Any]:
    random = np.random.default_rng(7)
    found: dict[str, Any] = {}

    def put(name: str, *shape: int, scale: float = 0.0) -> None:
        found[name] = (random.standard_normal(shape) * (scale or 1.5 * shape[-1] ** -0.5)).astype(np.float32)

    def linear(name: str, rows: int, columns: int) -> None:
        put(f"{name}/weight", rows, columns)
        put(f"{name}/bias", rows, scale=0.3)

    def norm(name: str) -> None:
        found[f"{name}/gamma"] = (1 + 0.2 * random.standard_normal(SIZE)).astype(np.float32)
        put(f"{name}/beta", SIZE, scale=0.2)

    put("decoder/embeddings/weight", VOCAB, SIZE, scale=0.3)
    put("decoder/position_encodings/encodings", CONTEXT, SIZE, scale=1.5)
    put("encoder/position_encodings/encodings", FRAMES, SIZE, scale=0.5)
    for number, rows in ((1, MELS), (2, SIZE)):
        put(f"encoder/conv{number}/weight", SIZE, rows, 3, scale=0.1)
        put(f"encoder/conv{number}/bias", SIZE, scale=0.1)
    for side in ("encoder", "decoder"):
        found[f"{side}/num_heads"] = np.int16(HEADS)
        norm(f"{side}/layer_norm")
        for layer in (f"{side}/layer_{number}" for number in range(LAYERS)):
            linear(f"{layer}/self_attention/linear_0", 3 * SIZE, SIZE)
            found[f"{layer}/self_attention/linear_0/bias"][SIZE : 2 * SIZE] = 0  # keys have no bias
            linear(f"{layer}/self_attention/linear_1", SIZE, SIZE)
            norm(f"{layer}/self_attention/layer_norm")
            if side == "decoder":
                linear(f"{layer}/attention/linear_0", SIZE, SIZE)
                linear(f"{layer}/attention/linear_1", 2 * SIZE, SIZE)
                found[f"{layer}/attention/linear_1/bias"][:SIZE] = 0
                linear(f"{layer}/attention/linear_2", SIZE, SIZE)
                norm(f"{layer}/attention/layer_norm")
            linear(f"{layer}/ffn/linear_0", FFN, SIZE)
            linear(f"{layer}/ffn/linear_1", SIZE, FFN)
            norm(f"{layer}/ffn/layer_norm")
    scalars = {"activation": np.int8(3), "pre_norm": np.int8(1), "scale_embeddings": np.int8(0), "start_from_zero_embedding": np.int8(0)}
    scalars |= {"alibi": np.int8(0), "alignment_heads": np.int16(1), "alignment_layer": np.int16(-1)}
    return found | {f"decoder/{name}": value for name, value in scalars.items()}


def written(found: dict[str, Any], aliases: dict[str, str], *, name: str = "WhisperSpec", version: int = 6) -> bytes:
    """Return the bytes of a model.bin as CTranslate2 reads it."""
    out = [struct.pack("<I", version), _text(name), struct.pack("<II", 3, len(found))]
    for variable, value in found.items():
        array = np.asarray(value, order="C")
        out += [_text(variable), struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)]
        out += [struct.pack("<BI", TYPES[array.dtype.name], array.nbytes), array.tobytes()]
    out.append(struct.pack("<I", len(aliases)))
    out += [_text(part) for pair in aliases.items() for part in pair]
    return b"".join(out)


def _text(text: str) -> bytes:
    data = text.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def tokenizer() -> str:
    import tokenizers

    found = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(TOKENS[:50])}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(TOKENS[50:])
    return found.to_str() + "\n"


ALIASES = {"decoder/projection/weight": "decoder/embeddings/weight"}


def main() -> None:
    import ctranslate2
    from faster_whisper.feature_extractor import FeatureExtractor

    (FOLDER / "model.bin").write_bytes(written(variables(), ALIASES))
    suppress: dict[str, list[int]] = {"suppress_ids": [], "suppress_ids_begin": [], "lang_ids": [52]}
    (FOLDER / "config.json").write_text(json.dumps({**suppress, "alignment_heads": [[0, 0]]}) + "\n")
    (FOLDER / "vocabulary.json").write_text(json.dumps(TOKENS) + "\n")
    (FOLDER / "tokenizer.json").write_text(tokenizer())
    seconds = np.arange(320 * FRAMES - 1000) / 16_000
    noise = np.random.default_rng(3).standard_normal(len(seconds))
    samples = (0.4 * np.sin(2 * np.pi * (300 + 900 * seconds) * seconds) + 0.05 * noise).astype(np.float32)
    mel = FeatureExtractor(feature_size=MELS)(np.pad(samples, (0, 320 * FRAMES - len(samples))), padding=0)[:, : 2 * FRAMES]
    model = ctranslate2.models.Whisper(str(FOLDER), device="cpu", compute_type="float32")
    features = ctranslate2.StorageView.from_array(np.ascontiguousarray(mel[None].astype(np.float32)))
    options = {"beam_size": 1, "return_logits_vocab": True, "suppress_blank": False, "suppress_tokens": [], "max_length": 20}
    result = model.generate(features, [PROMPT], **options)[0]
    logits = np.stack([np.array(row, np.float32) for row in result.logits[0]])
    encoded = np.array(model.encode(features))[0]
    aligned = model.align(features, PROMPT[:-1], [TEXT], 2 * FRAMES, median_filter_width=7)[0].alignments
    arrays = {
        "samples": samples,
        "mel": mel.T,
        "encoded": encoded,
        "prompt": PROMPT,
        "continuation": result.sequences_ids[0],
        "logits": logits,
        "text": TEXT,
        "first_frames": [min(frame for row, frame in aligned if row == number) for number in range(len(TEXT) + 1)],
    }
    np.savez_compressed(FOLDER / "golden.npz", **arrays)
    print({name: np.shape(value) for name, value in arrays.items()}, result.sequences_ids[0])


if __name__ == "__main__":
    main()
