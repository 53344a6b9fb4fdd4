"""Tokenizers as models bring them: in other formats than tokenizer.json, and with tokens for which the model has no embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.constraints.compiler import ConstraintCompiler
from server.engine.worker import engine_of
from server.messages import Constraint, ConstraintKind, Failed, FromWorker, SamplingParams, Submit, Tokens
from tests.deploy.gguf_files import VOCAB
from tests.e2e.user_files.bring import answers_as, bring, change_json, refused, write_folder


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), r"tokenizer\.json is missing\. Download it"),
        (("tokenizer.model",), r"tokenizer\.json is missing, and tokenizer\.model cannot replace it: an integer does not end"),
        (("vocab.json", "merges.txt"), r"and vocab\.json and merges\.txt cannot replace it: vocab\.json is damaged"),
        (("vocab.txt",), r"tokenizer\.json is missing, and vocab\.txt cannot replace it\."),
        (("tekken.json",), r"tokenizer\.json is missing, and tekken\.json cannot replace it: tekken\.json is damaged"),
    ],
)
def test_a_tokenizer_in_another_format_is_named_with_the_way_to_convert_it(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    for name in names:
        (folder / name).write_bytes(b"x")
    refused(folder, said + r".*AutoTokenizer\.from_pretrained\(DIR\)\.save_pretrained\(DIR\)")


def heard_of(prompt: list[int], folder: Path, constraint: Constraint | None) -> list[FromWorker]:
    """Return what the worker's engine says about a request."""
    heard: list[FromWorker] = []
    loaded = bring(folder).loaded
    assert loaded.step_model is not None and loaded.read_tokenizer is not None
    compiler = ConstraintCompiler(loaded.read_tokenizer, eos_ids=loaded.eos_ids, vocab_size=loaded.step_model.limits.vocab_size)
    engine = engine_of(loaded, heard.append, compiler)
    try:
        engine.submit(Submit("r", tuple(prompt), SamplingParams(max_tokens=4, temperature=0.0, constraint=constraint)))
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
        compiler.close()
    return heard


@pytest.mark.parametrize("constraint", [None, Constraint(ConstraintKind.REGEX, "(a|b)+")])
def test_tokens_beyond_the_table_are_refused_where_a_prompt_has_them(constraint: Constraint | None, tmp_path: Path) -> None:
    """Tokenizers of vision models have tokens for images, for which some models have no embedding. Other prompts are answered, also with a
    constraint, which knows all tokens of the tokenizer."""
    folder = write_folder(tmp_path / "model")
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    change_json(folder / "tokenizer.json", decoder=decoder, added_tokens=[{"id": len(VOCAB), "content": "<image>", **usual}])
    table = json.loads((folder / "config.json").read_text())["vocab_size"]
    beyond = answers_as(folder, "llama").tokenizer.encode("<image>", add_special_tokens=False)
    assert beyond == [len(VOCAB)] and table < len(VOCAB)
    (failed,) = heard_of([1, *beyond], folder, constraint)
    assert isinstance(failed, Failed) and f"prompt has token {beyond[0]}; expected 0 to {table - 1}" in failed.message
    said = heard_of([1, 2], folder, constraint)
    assert any(isinstance(message, Tokens) for message in said) and not any(isinstance(message, Failed) for message in said), said
