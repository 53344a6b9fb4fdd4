"""The benchmark of kernels. The model is so small that the expected bytes and operations can be counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from compiler.frontend.mixture import Mixture
from compiler.ir.dtypes import DType
from compiler.machine.target import get
from deploy.bench import synthetic
from deploy.bench.compute import kernels, model
from deploy.bench.compute.model import Model
from deploy.bench.limits import Limits

HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, FFN, VOCAB = 64, 2, 4, 2, 16, 96, 128


class Known:
    """A fake gauge of the machine's limits. It always reports the same limits."""

    limits = Limits(1e9, 1e10)

    def sample(self) -> None:
        """Do nothing, because these limits never change."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setitem(synthetic.SHAPES, "small", (HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, FFN, VOCAB))
    monkeypatch.setattr(model, "CONTEXTS", (64,))
    made = Model(synthetic.synthetic_config("small"), "bf16", 2, kv_dtype=DType.BF16, target=get("x86-64-v3"))
    yield made
    made.session.close()


def test_the_work_of_a_step_is_what_its_shapes_say(small: Model):
    work = kernels.work_of(small, small.step(24, 3, 48))
    attention = next(w for name, w in work.items() if "attention" in name)
    assert attention.num_bytes == LAYERS * 3 * 48 * 2 * KV_HEADS * SIZE * 2
    assert attention.operations == LAYERS * 3 * sum(range(41, 49)) * 4 * HEADS * SIZE
    products = [w for w in work.values() if w.multiplies_weights]
    per_layer = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * SIZE + 3 * HIDDEN * FFN
    assert sum(w.operations for w in products) == 2 * (24 * LAYERS * per_layer + 3 * HIDDEN * VOCAB)
    assert sum(w.num_bytes for w in products) >= 2 * (LAYERS * per_layer + HIDDEN * VOCAB)
    assert work["embedding"].num_bytes < 24 * HIDDEN * 8, "an embedding reads only its rows of the table"


def test_only_the_chosen_experts_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(synthetic.SHAPES, "few", (HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE, FFN, VOCAB))
    monkeypatch.setitem(synthetic.MIXTURES, "few", Mixture(num_experts=8, num_chosen=2, size=96))
    monkeypatch.setattr(model, "CONTEXTS", (64,))
    made = Model(synthetic.synthetic_config("few"), "bf16", 2, kv_dtype=DType.BF16, target=get("x86-64-v3"))
    for tokens, share in ((1, 2 / 8), (2, 1 - (6 / 8) ** 2)):
        work = kernels.work_of(made, made.step(tokens, tokens, 48))
        read = [w.num_bytes for name, w in work.items() if name.startswith("expert_linear")]
        weights = 2 * LAYERS * 8 * 3 * HIDDEN * 96 * share
        assert weights < sum(read) < 1.1 * weights, "the rest is rows"
    made.session.close()


def test_kernels_come_by_the_time_above_their_limit(small: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "STEPS", ((1, 1, 64), (32, 1, 32)))
    gauge: Any = Known()
    rows = kernels.measure(small, gauge, gauge)
    assert list(dict.fromkeys(r.step for r in rows)) == ["decode 1 x 64", "prefill 32"]
    for step in ("decode 1 x 64", "prefill 32"):
        lost = [r.lost_s for r in rows if r.step == step]
        assert lost == sorted(lost, reverse=True)
        assert {"paged_attention", "embedding"} <= {r.kernel for r in rows if r.step == step}
    assert all(r.seconds > 0 and r.share >= 0 for r in rows)
    assert all(r.share == pytest.approx(Known.limits.seconds(r.num_bytes, r.operations) / r.seconds) for r in rows)
