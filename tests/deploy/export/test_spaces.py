"""The page splits texts at the white space and the digits of Unicode, as the package tokenizers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.normalizers import Strip
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split, Whitespace, WhitespaceSplit

from tests.node import run_node

RUNTIME = Path(__file__).parents[3] / "runtime" / "web"
SPLIT = """
import { pathToFileURL } from 'node:url';
const [runtime, given] = process.argv.slice(1), { described, texts } = JSON.parse(given);
const { Tokenizer } = await import(pathToFileURL(`${runtime}/vendor/tokenizers.mjs`));
const { useUnicode } = await import(pathToFileURL(`${runtime}/spaces.mjs`));
const tokenizer = new Tokenizer(described, {});
useUnicode(tokenizer, described);
const pieces = (text) => {
  const said = tokenizer.normalizer === null ? text : tokenizer.normalizer.normalize(text);
  return tokenizer.pre_tokenizer === null ? [said] : tokenizer.pre_tokenizer.pre_tokenize(said, { section_index: 0 });
};
console.log(JSON.stringify(texts.map(pieces)));
"""
SPACES = [*range(0x20), 0x85, 0xA0, 0x1680, 0x180E, *range(0x2000, 0x2010), 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF]
LETTERS = "aé日0_٣½①\u0301\u200d!€🙂"
PARTS: dict[str, Any] = {
    "digits": Digits(individual_digits=True),
    "numbers": Digits(individual_digits=False),
    "bytes": ByteLevel(add_prefix_space=False),
    "words": Whitespace(),
    "parts": WhitespaceSplit(),
    "several": Sequence([WhitespaceSplit(), Punctuation()]),
    "pattern": Split(Regex(r"\s+(?!\S)|\s+|[^\s]+"), "isolated"),
}


@pytest.mark.parametrize("name", PARTS)
def test_texts_are_cut_as_by_the_package(name: str) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = PARTS[name]
    texts = [f"a{chr(one)}{chr(two)}b{chr(one)} " for one in SPACES for two in (0x20, 0x85, 0xFEFF, one)]
    texts += [one + two + three for one in LETTERS for two in LETTERS for three in (" ", "x", "é")]
    expected = [[piece for piece, _ in PARTS[name].pre_tokenize_str(text)] for text in texts]
    assert pieces(tokenizer, texts) == expected


@pytest.mark.parametrize("strips", [Strip(), Strip(left=False), Strip(right=False), Normalizers([Strip()])])
def test_the_ends_of_texts_are_cut_as_by_the_package(strips: Any) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.normalizer = strips
    texts = [f"{chr(one)} a{chr(one)}b {chr(one)}" for one in SPACES]
    assert pieces(tokenizer, texts) == [[strips.normalize_str(text)] for text in texts]


def pieces(tokenizer: Tokenizer, texts: list[str]) -> list[list[str]]:
    return json.loads(run_node(SPLIT, RUNTIME, json.dumps({"described": json.loads(tokenizer.to_str()), "texts": texts})))
