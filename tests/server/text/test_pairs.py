"""The tokenizer joins a pair of texts to the same tokens as the `tokenizers` package does."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Package
from tokenizers import models, pre_tokenizers, processors

from server.text.tokenizer import Tokenizer

WORDS = ["[CLS]", "[SEP]", "<s>", "</s>", "a", "b", "cold", "water", "[UNK]"]
PROCESSORS = {
    "bert": processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 3), ("<s>", 2)),
    "none": None,
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_pair_is_joined_as_the_package_joins_it(kind):
    package = Package(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    package.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[kind] is not None:
        package.post_processor = PROCESSORS[kind]
    tokenizer = Tokenizer({"tokenizer.json": package.to_str().encode(), "config.json": json.dumps({}).encode()})
    for first, second in (("a", "b"), ("cold water a", "b b"), ("", "a"), ("cold", "")):
        expected = package.encode(first, second)
        pair = tokenizer.pair_template.join(tokenizer.encode(first, False), tokenizer.encode(second, False))
        assert pair.ids == expected.ids
        kinds = [0 if pair.second is None else int(at >= pair.second) for at in range(len(pair.ids))]
        assert kinds == expected.type_ids
