"""Fixtures that create constraint compilers, in addition to the fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.constraints.compiler import ConstraintCompiler, ConstraintLimits
from tests.server.engine.conftest import EOS, VOCAB, constraints, random_submits, rig, tokenizer, tokenizer_json

__all__ = ["constraints", "random_submits", "rig", "tokenizer", "tokenizer_json"]


@pytest.fixture(scope="session")
def spaces() -> str:
    """Return a tokenizer in JSON format. Its vocabulary includes tokens of up to 32 spaces."""
    letters = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("Ġ" * length for length in range(2, 33))]
    merges = [("Ġ" * (length - 1), "Ġ") for length in range(2, 33)]
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.get_vocab_size() < VOCAB
    return tokenizer.to_str()


@pytest.fixture
def compiler(spaces: str) -> Iterable[Callable[..., ConstraintCompiler]]:
    """Return a function that creates constraint compilers. Each compiler has its own processes."""
    compilers: list[ConstraintCompiler] = []

    def make(**limits) -> ConstraintCompiler:
        compilers.append(ConstraintCompiler(spaces.encode, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(**limits)))
        return compilers[-1]

    yield make
    for one in compilers:
        one.close()
