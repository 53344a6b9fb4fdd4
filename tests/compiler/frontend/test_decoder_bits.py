"""The bits of a row's logits depend only on the row's own sequence, not on other sequences in the batch, chunks, pages or threads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from runtime.executable import Call

# (model, weight format). The quick cases cover grouped heads, soft caps with windows, quantised weights, mixtures of experts (which group
# rows of different sequences by expert), attention sinks, states, latents, shared pages, several residual streams and attention to chunks.
QUICK = [
    ("llama", "f32"),
    ("gemma2", "f32"),
    ("llama", "bf16"),
    ("llama", "int8"),
    ("qwen3", "int4-32"),
    ("llama", "fp8"),
    ("qwen3_moe", "f32"),
    ("gpt_oss", "int8"),
    ("qwen3_next", "f32"),  # compiled for test_models.py, too, like other models in f32
    ("falcon_h1", "f32"),
    ("gemma3n", "f32"),
    ("gemma4", "bf16"),
    ("deepseek_v2", "int8"),
    ("llama4", "f32"),
]
# Other formats, and other families, whose layers are of the same kinds as in the quick cases.
SLOW = [
    ("qwen3_next", "int8"),
    ("falcon_h1", "int8"),
    ("gemma3n", "bf16"),
    ("llama4", "bf16"),
    ("gemma3", "f32"),
    ("phi3-longrope", "f32"),
    ("mixtral", "int8"),
    ("olmoe", "int4-32"),
    ("lfm2", "f32"),
    ("granitemoehybrid", "bf16"),
    ("glm4_moe_lite", "bf16"),
]
CASES = [
    pytest.param(case, marks=[pytest.mark.xdist_group(case[0]), *([pytest.mark.slow] if case in SLOW else [])], id="-".join(case))
    for case in (*QUICK, *SLOW)
]


def text_of(model: Any) -> np.ndarray:
    """Return a text that is longer than the model's window, than a page, and than the context length from which the model's rope is
    extended."""
    return np.concatenate([model.golden["prompt"], model.golden["continuation"]])


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, causal: Callable[..., Any]) -> Any:
    return causal(*request.param)


def test_decode_equals_prefill(model: Any) -> None:
    text = text_of(model)
    whole = model.start().feed({"a": text})["a"]
    sequences = model.start(seed=1)
    for position, token in enumerate(text):
        np.testing.assert_array_equal(sequences.feed({"a": [token]})["a"][0], whole[position])


def test_chunked_prefill_equals_whole(model: Any) -> None:
    text = text_of(model)
    whole = model.start().feed({"a": text})["a"]
    for cuts in ([0, 1, 8, 24, 29, 40, 104], [0, 16, 32, 48, 104], [0, 50, 103, 104]):
        sequences = model.start(seed=2)
        chunks = [sequences.feed({"a": text[low:high]})["a"] for low, high in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(chunks), whole)


def test_batch_equals_each_alone(model: Any) -> None:
    """17 sequences of different lengths run in two steps that mix prefill and decode. The logits of each sequence have the same bits as
    when the sequence runs alone."""
    random = np.random.default_rng(3)
    vocab_size = model.config.vocab_size
    firsts = {f"s{n}": random.integers(3, vocab_size, length) for n, length in enumerate([1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 60])}
    seconds = {name: random.integers(3, vocab_size, 1 + n % 3 * n) for n, name in enumerate(firsts)}
    seconds |= {f"s{n}": random.integers(3, vocab_size, length) for n, length in enumerate([1, 9, 18, 27], start=13)}
    sequences = model.start(num_threads=2)
    batched = [sequences.feed(firsts), sequences.feed(seconds)]
    assert len(batched[1]) == 17
    for name in seconds:
        alone = model.start(seed=4)
        for step, pieces in zip(batched, (firsts, seconds), strict=True):
            if name in pieces:
                np.testing.assert_array_equal(alone.feed({name: pieces[name]})[name], step[name], err_msg=name)


def test_two_threads_equal_one(model: Any) -> None:
    text = text_of(model)
    one = model.start().feed({"a": text, "b": text[:30]})
    for _ in range(3):  # the threads divide the work differently in each run
        two = model.start(num_threads=2).feed({"a": text, "b": text[:30]})
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


def test_a_step_is_one_region(model: Any) -> None:
    """One native call runs all kernels of a step, so the virtual machine executes few instructions per step."""
    callees = [i.callee for i in model.executable.meta.functions[model.entry].instructions if isinstance(i, Call)]
    assert callees.count("vm.run_region") == 1
