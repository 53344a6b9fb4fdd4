"""The tokenizer that grammars share, made from tokenizer.json."""

import pytest
import tokenizers

from server.constraints.process.vocabulary import tokenizer_of, untruncated
from server.constraints.process.wire import GrammarSettings
from tests.server.text.test_tokenizer import wordpiece


def settings(vocab_size: int, eos_ids: list[int]) -> GrammarSettings:
    counts = dict.fromkeys(("grammar_size", "row_items", "step_items", "initial_fuel", "memory_bytes"), 1)
    limits = {**counts, "compile_s": 1.0, "slow_s": 1.0, "excess_s": 1.0}
    return GrammarSettings(eos_ids, vocab_size, **limits)


def test_truncation_and_padding_are_left_out_and_the_rest_stays() -> None:
    tokenizer = wordpiece()
    text = untruncated(tokenizer.to_str().encode()).decode()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert tokenizers.Tokenizer.from_str(text).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b'{"model": {}}', b"[" * 100_000])
def test_a_damaged_tokenizer_is_named(content: bytes) -> None:
    found = tokenizer_of(content, settings(8, []))
    assert isinstance(found, str) and found.startswith("constraints cannot use this model's tokenizer: ")
