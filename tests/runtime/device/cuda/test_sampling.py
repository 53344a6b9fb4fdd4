"""The GPU's sampler chooses the same tokens as the reference in NumPy, and its log-probabilities have the same bits as the reference's."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.frontend.sampler import SAMPLE_ENTRY, build_sampler
from compiler.machine.target import get
from compiler.sampling.meaning import sample
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.ops.sampling.test_operators import KINDS, batch, equal
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]

VOCAB, ROWS = 70, 3
MOST = ["plain", "greedy, reported", "all truncations", "penalised"]


@pytest.fixture(scope="module")
def executable() -> Executable:
    return compile_module(build_sampler(VOCAB, ROWS), Options(get("sm_80")))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in MOST else pytest.mark.slow) for kind in KINDS])
def test_the_same_tokens_are_drawn_from_the_same_logits(kind: str, executable: Executable, software_gpu: SoftwareGpu) -> None:
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    given = batch(rng, VOCAB, ROWS, **KINDS[kind])
    equal(Session(executable).call(SAMPLE_ENTRY, logits, *given.arrays), sample(logits, *given.arrays))
