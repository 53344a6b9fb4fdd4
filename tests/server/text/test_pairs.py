"""The tokenizer joins a pair of texts to the same tokens as the `tokenizers` package does, and knows the special tokens around a text."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Package
from tokenizers import models, pre_tokenizers, processors

from server.text.pairs import TextTemplate
from server.text.tokenizer import Tokenizer

WORDS = ["[CLS]", "[SEP]", "<s>", "</s>", "a", "b", "cold", "water", "[UNK]"]
PROCESSORS = {
    "bert": processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 3), ("<s>", 2)),
    "none": None,
}


def package_of(kind):
    package = Package(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    package.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[kind] is not None:
        package.post_processor = PROCESSORS[kind]
    return package, Tokenizer({"tokenizer.json": package.to_str().encode(), "config.json": json.dumps({}).encode()})


@pytest.mark.parametrize(("kind", "before", "after"), [("bert", (0,), (1,)), ("roberta", (2,), (3,)), ("none", (), ())])
def test_the_special_tokens_around_a_text(kind, before, after):
    package, tokenizer = package_of(kind)
    assert tokenizer.text_template == TextTemplate(before, after)
    for text in ("cold water a", "a", ""):
        ids = package.encode(text).ids
        begin, end = tokenizer.text_template.text_in(ids)
        assert ids[begin:end] == package.encode(text, add_special_tokens=False).ids


def test_special_tokens_that_a_text_lacks_are_not_found():
    assert TextTemplate((1,), (2,)).text_in([5, 6]) == (0, 2)
    assert TextTemplate((1,), (2,)).text_in([1, 6]) == (1, 2)
    assert TextTemplate((1,), (2,)).text_in([5, 2]) == (0, 1)
    assert TextTemplate((1,), (2, 3)).text_in([3]) == (0, 1)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_pair_is_joined_as_the_package_joins_it(kind):
    package, tokenizer = package_of(kind)
    for first, second in (("a", "b"), ("cold water a", "b b"), ("", "a"), ("cold", "")):
        expected = package.encode(first, second)
        pair = tokenizer.pair_template.join(tokenizer.encode(first, False), tokenizer.encode(second, False))
        assert pair.ids == expected.ids
        kinds = [0 if pair.second is None else int(at >= pair.second) for at in range(len(pair.ids))]
        assert kinds == expected.type_ids
