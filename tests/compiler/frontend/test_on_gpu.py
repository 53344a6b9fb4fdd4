"""Causal families on a simulated GPU: logits are close to those of transformers and of the CPU, and the logits of a token have the same
bits in every batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from compiler.frontend.errors import ConfigError
from compiler.ir.dtypes import DType
from compiler.machine.target import get
from runtime.device.cuda.device import CudaDevice
from tests.compiler.frontend.test_models import NAMES, largest_error, mean_error
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import needs_pycuda
from tests.gpu.fixtures import software_gpu as software_gpu

QUICK = {"llama", "gemma3"}  # llama has grouped heads; gemma3 has windows, norms per head and two ropes
OLDER = {"gemma3"}  # families on an older GPU, whose products run on mma.sync
pytestmark = [needs_pycuda, pytest.mark.gpu, pytest.mark.usefixtures("software_gpu"), pytest.mark.xdist_group("families on a GPU")]
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def on_gpu(causal: Callable[..., Any], case: str, format: str) -> Any:
    model = causal(case, format, target=get("sm_80" if case in OLDER else "sm_90a"))
    assert isinstance(model.session(1).device, CudaDevice)
    return model


def test_logits_and_the_next_token_are_those_of_transformers(case: str, causal: Callable[..., Any]) -> None:
    model = on_gpu(causal, case, "f32")
    logits = model.start().feed({"a": model.golden["prompt"]})["a"]
    assert largest_error(logits, model.golden["logits"]) < 2e-4
    assert logits[-1].argmax() == model.golden["continuation"][0]


def test_logits_in_f32_are_those_of_the_cpu(case: str, causal: Callable[..., Any]) -> None:
    """The logits of GPU and CPU differ by at most 2e-5 of the largest logit, because the GPU adds the terms of sums in another order."""
    tokens = on_gpu(causal, case, "f32").golden["prompt"][:9]
    gpu, cpu = (model.start().feed({"a": tokens})["a"] for model in (on_gpu(causal, case, "f32"), causal(case)))
    assert largest_error(gpu, cpu) < 2e-5


@pytest.mark.parametrize("format", ["bf16", pytest.param("int8", marks=pytest.mark.slow), pytest.param("int4-32", marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_a_batch(case: str, format: str, causal: Callable[..., Any]) -> None:
    try:
        model = on_gpu(causal, case, format)
    except ConfigError as error:
        assert format == "int4-32" and "not a multiple of the group size" in str(error), error
        pytest.skip("the model has matrices without whole groups of inputs")
    text = model.golden["prompt"][:20]
    whole = model.start().feed({"a": text})["a"]
    chunked = model.start(seed=1)
    chunks = [chunked.feed({"a": text[low:high]})["a"] for low, high in pairwise([0, 1, 17, 18, len(text)])]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)
    others = {f"b{n}": np.random.default_rng(n).integers(3, model.config.vocab_size, n) for n in (1, 5, 16, 33)}
    batched = model.start(seed=2).feed({**others, "a": text})
    np.testing.assert_array_equal(batched["a"], whole)
    np.testing.assert_array_equal(batched["b5"], model.start().feed({"b5": others["b5"]})["b5"])


def test_logits_in_bf16_are_those_of_the_program_that_rounds_rows(
    case: str, causal: Callable[..., Any], interpreted: Callable[..., Any]
) -> None:
    """The logits differ where another order of summation rounds a number to another bf16, by less than 1e-2 of the largest logit."""
    tokens = on_gpu(causal, case, "bf16").golden["prompt"][:9]
    gpu, meaning = (model.start().feed({"a": tokens})["a"] for model in (on_gpu(causal, case, "bf16"), interpreted(case, "bf16")))
    assert largest_error(gpu, meaning) < 1e-2


def in_chunks(gpu: Any, text: Any) -> Any:
    """Return the logits of a text that runs in three chunks, one of them a single token."""
    chunked = gpu.start(seed=1)
    return np.concatenate([chunked.feed({"a": text[low:high]})["a"] for low, high in pairwise([0, 10, 11, len(text)])])


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_prompts_over_pages_of_bf16(name: str, causal: Callable[..., Any]) -> None:
    """With bf16 pages, which tensor cores read, the logits of a token have the same bits whether its prompt runs at once or in chunks, one
    of them a single token. The logits are close to those of the CPU."""
    gpu, cpu = (causal(name, "bf16", target=target, kv_dtype=DType.BF16) for target in (get("sm_80"), None))
    text = gpu.golden["prompt"][:20]
    whole = gpu.start().feed({"a": text})["a"]
    assert mean_error(whole, cpu.start().feed({"a": text})["a"]) < 3e-2
    np.testing.assert_array_equal(in_chunks(gpu, text), whole)


@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_floats_of_eight_bits(target: str, causal: Callable[..., Any]) -> None:
    """With matrices of an fp8 checkpoint, the logits of a token have the same bits in one piece, in chunks and in a batch. The logits are
    close to those of the CPU, which may have no products of bf16: then it does not round rows as the GPU does."""
    gpu, cpu = causal("llama", "fp8", target=get(target)), causal("llama", "fp8")
    text = gpu.golden["prompt"][:20]
    whole = gpu.start().feed({"a": text})["a"]
    assert mean_error(whole, cpu.start().feed({"a": text})["a"]) < 2e-2
    np.testing.assert_array_equal(in_chunks(gpu, text), whole)
    batched = gpu.start(seed=2).feed({"b": text[:7], "a": text})
    np.testing.assert_array_equal(batched["a"], whole)
