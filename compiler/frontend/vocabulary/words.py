"""How byte-level tokenizers split a text into words, inside which they merge bytes."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_WORDS = QWEN2_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")


def as_gpt2(*, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)


def as_gpt2_with_single_digits(*, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2(add_prefix_space=add_prefix_space)])


def by_expressions(*expressions: str) -> pre_tokenizers.PreTokenizer:
    """Return a splitter that applies the expressions one after another: each match becomes a part, and so does the text between matches.
    Then it writes the bytes of the parts as characters."""
    splits = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
