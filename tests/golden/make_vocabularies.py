"""Writes small vocabularies in the formats of sentencepiece and GPT-2, and the ids that sentencepiece and transformers give for texts.

python -m venv V; V/bin/pip install sentencepiece==0.2.3 'transformers==4.57.6' protobuf; V/bin/python tests/golden/make_vocabularies.py

Each folder of `vocabularies` has the files of a model without tokenizer.json, and `ids.json`: the ids of the strings of
tests/real/tokens.json and of TEXTS, from sentencepiece (`plain`: without special tokens) and from the class of transformers in Python that
reads these files (`whole`: as a prompt, with special tokens).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

HERE = Path(__file__).parent / "vocabularies"
STRINGS: list[str] = json.loads((Path(__file__).parents[1] / "real" / "tokens.json").read_text())["strings"]
# Texts with special and added tokens of the vocabularies, and with what looks like them.
TEXTS = [
    "<s>[INST] Hello [/INST] there</s>",
    "a<s>b</s>c",
    " <s> a </s> ",
    "<|endoftext|>the<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<unk>the<unk>",
    "<0x41><0x0A>",
    "<turn>user\nhi<end>",
    "a<turn>b <turn>  c",
    "\n\n\n  \n\n",
    "▁▁the▁",
    "<extra>after <extra> it",
    "  the  <mask> end",
    "    ",
    "ＡＢＣ ﬁne ½",
]
CORPUS = [text for text in STRINGS if text.strip()] * 4 + ["In 2010 and 1999, 12345 of 2024 people paid 100.50 in 2010."] * 8
RULES = "FF21\t41\nFF22\t42\nFF23\t43\nFB01\t66 69\nBD\t31 2F 32\n9\t20\nA\t20\n"  # of characters that are replaced: a table of its own
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True}
TOKEN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}

SENTENCEPIECE: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # as Llama 2 and Mistral 7B v0.1
    "llama": ({"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True}, LLAMA),
    # with added tokens, one of which replaces the token that has its id
    "added": (
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
        {
            **LLAMA,
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                "0": {"content": "<unk>", "special": True, **TOKEN},
                "1": {"content": "<s>", "special": True, **TOKEN},
                "2": {"content": "<|im_end|>", "special": True, **TOKEN},
                "700": {"content": "<|im_start|>", "special": True, **TOKEN},
                "701": {"content": "<extra>", "special": False, **TOKEN},
            },
        },
    ),
    "not_legacy": ({"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}, {**LLAMA, "legacy": False}),
    # as Gemma
    "gemma": (
        {
            "model_type": "bpe",
            "byte_fallback": True,
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
            "bos_id": 2,
            "eos_id": 1,
            "unk_id": 3,
            "pad_id": 0,
            "bos_piece": "<bos>",
            "eos_piece": "<eos>",
            "user_defined_symbols": ["<turn>", "<end>", "\n\n", "\n\n\n", "▁▁", "▁▁▁▁"],
        },
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "defined": (
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False, "user_defined_symbols": ["<turn>", "▁▁", "\n\n"]},
        LLAMA,
    ),
    "unknown": ({"model_type": "bpe", "remove_extra_whitespaces": True}, LLAMA),
    "unigram": (
        {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": ["<turn>", "the▁"], "remove_extra_whitespaces": True},
        LLAMA,
    ),
    "table": ({"model_type": "unigram", "rules": RULES}, LLAMA),
}
BYTE_LEVEL: Mapping[str, tuple[str, list[str], dict[str, Any]]] = {
    "gpt2": ("GPT2Tokenizer", ["<|endoftext|>"], {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False}),
    "qwen2": (
        "Qwen2Tokenizer",
        [],
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "added_tokens_decoder": {
                "420": {"content": "<|endoftext|>", "special": True, **TOKEN},
                "421": {"content": "<|im_start|>", "special": True, **TOKEN},
                "422": {"content": "<|im_end|>", "special": True, **TOKEN},
                "423": {"content": "<extra>", "special": False, **TOKEN},
            },
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
    ),
    "roberta": ("RobertaTokenizer", ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], {"tokenizer_class": "RobertaTokenizer"}),
}


def train_pieces(folder: Path, options: dict[str, Any]) -> None:
    import sentencepiece

    rules, own = options.pop("rules", None), {}
    if rules is not None:
        (folder / "rules.tsv").write_text(rules)
        own = {"normalization_rule_tsv": str(folder / "rules.tsv")}
    (folder / "corpus.txt").write_text("\n".join(line for text in CORPUS for line in text.split("\n") if line.strip()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=700,
        character_coverage=0.98,
        max_sentence_length=1 << 16,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **({} if own else {"normalization_rule_name": "identity"}),
        **own,
        **options,
    )
    for name in ("tokenizer.vocab", "corpus.txt", "rules.tsv"):
        (folder / name).unlink(missing_ok=True)


def train_bytes(folder: Path, name: str, first: list[str]) -> None:
    import tokenizers

    from compiler.frontend.vocabulary.words import QWEN2_WORDS

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(QWEN2_WORDS), "isolated")
    words = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.pre_tokenizer = words if name == "Qwen2Tokenizer" else pre.ByteLevel(add_prefix_space=False)
    alphabet = pre.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, special_tokens=first, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))


def main() -> None:
    import sentencepiece
    import transformers

    def ids(tokenizer: Any) -> list[list[int]]:
        return [tokenizer(text)["input_ids"] for text in (*STRINGS, *TEXTS)]

    for name, (options, config) in SENTENCEPIECE.items():
        folder = _fresh(name, config)
        train_pieces(folder, dict(options))
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        slow = getattr(transformers, config["tokenizer_class"]).from_pretrained(folder)
        _write(folder, {"plain": [pieces.encode(text) for text in STRINGS], "whole": ids(slow)})
    for name, (class_, first, config) in BYTE_LEVEL.items():
        folder = _fresh(name, config)
        train_bytes(folder, class_, first)
        _write(folder, {"whole": ids(getattr(transformers, class_).from_pretrained(folder))})


def _fresh(name: str, config: dict[str, Any]) -> Path:
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir(parents=True)
    (HERE / name / "tokenizer_config.json").write_text(json.dumps(config))
    return HERE / name


def _write(folder: Path, found: Mapping[str, list[list[int]]]) -> None:
    (folder / "ids.json").write_text(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
