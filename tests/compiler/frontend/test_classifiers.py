"""The logits of decoders with a classification head are close to those of Hugging Face transformers. Checkpoints converted from
Qwen3-Reranker are recognised by the prompt in their chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.classes import Classes, Scores
from compiler.frontend.decoder import HIDDEN
from compiler.frontend.registry import load_config
from compiler.frontend.reranker import QWEN3
from tests.compiler.frontend.test_models import GOLDEN

CASES = {
    "llama-classes": Classes(("low", "middle", "high"), Scores.SOFTMAX),
    "qwen2-classes": Classes(("LABEL_0", "LABEL_1"), Scores.SIGMOID),
    "qwen3-reranker": Classes(("LABEL_0",), Scores.SIGMOID),
    "gemma2-classes": Classes(("no", "yes"), Scores.SOFTMAX),
}


@pytest.mark.parametrize("case", CASES)
def test_the_last_token_has_the_numbers_of_its_text(case: str, interpreted: Callable[..., Any]) -> None:
    model = interpreted(case, entry=HIDDEN)
    texts = np.split(model.golden["ids"], np.cumsum(model.golden["lengths"])[:-1])
    rows = model.start().feed({str(number): text for number, text in enumerate(texts)})
    found, expected = np.stack([numbers[-1] for numbers in rows.values()]), model.golden["logits"]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_states_the_classes(case: str) -> None:
    config = load_config(GOLDEN / case)
    assert (config.classes, config.verdict, config.pair_prompt) == (CASES[case], None, None)


def test_a_decoder_that_generates_has_no_classes() -> None:
    """A decoder that generates text has no classes, although every configuration of transformers may have `id2label`: only the class name
    in `architectures` makes a model a classifier."""
    assert load_config(GOLDEN / "llama").classes is None


@pytest.mark.parametrize(("file", "spelled"), [("chat_template.jinja", str), ("tokenizer_config.json", json.dumps)])
def test_a_conversion_of_qwen3_reranker_keeps_its_prompt(file: str, spelled: Callable[[str], str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen3-reranker", folder)
    (folder / file).write_text(spelled("{{ messages }}"))
    assert load_config(folder).pair_prompt is None
    (folder / file).write_text(spelled(QWEN3.before + "{{ messages }}"))
    assert load_config(folder).pair_prompt == QWEN3


def test_the_prompt_of_qwen3_reranker() -> None:
    """The prompt equals the one in the example of Qwen3-Reranker's model card. The instruction of that example is the default."""
    first, second, third = QWEN3.marks
    assert f"{QWEN3.before}{first}{QWEN3.instruction}{second}QUERY{third}DOCUMENT{QWEN3.after}" == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: QUERY\n<Document>: DOCUMENT"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
