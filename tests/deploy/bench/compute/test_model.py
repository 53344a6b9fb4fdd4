"""The benchmark that compares a model with the limits of the machine: what it counts, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from compiler.frontend.config import Latent, Recurrence
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.mixture import Mixture
from deploy.bench import synthetic
from deploy.bench.compute import kernels, model
from deploy.bench.limits import Limits
from deploy.bench.synthetic import shapes_of, synthetic_config
from server.settings import SettingsError

VOCAB = 128


class Known:
    """A fake gauge. It reports that every run takes one second."""

    limits = Limits(1e6, 1e7)

    def __init__(self, *_: object) -> None:
        pass

    def beside(self, run: Callable[[], object], **_: object) -> tuple[float, Limits]:
        run()
        return 1.0, self.limits


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "small", (64, 1, 4, 2, 16, 96, VOCAB))


def test_each_step_is_printed_with_its_share_of_the_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model, "Gauge", Known)
    for name, values in {"PREFILLS": (32,), "BATCHES": (1, 4), "CONTEXTS": (64,)}.items():
        monkeypatch.setattr(model, name, values)
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ["--synthetic", "small", "--head-size", "80", "--kv-heads", "1", "--kv-dtype", "bf16"]
    model.main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["growth"] == [] and found["lengthening"] is None and found["limits"] == {"bytes_per_s": 1e6, "flops": 1e7}
    assert [(row["name"], row["tokens_per_s"]) for row in found["rows"]] == [("prefill 32", 32), ("decode 1 x 64", 1), ("decode 4 x 64", 4)]
    assert all(row["share"] == max(row["num_bytes"] / 1e6, row["operations"] / 1e7) > 0 for row in found["rows"])
    model.main(arguments)
    printed = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [cells[1:3] + cells[5:6] for cells in printed] == [
        [r["name"], f"{r['tokens_per_s']:.1f}", f"{r['share']:.2f}"] for r in found["rows"]
    ]


def test_the_type_of_pages_has_the_name_that_a_load_takes() -> None:
    parser = model.model_options("model", None)
    options = parser.parse_args(["--synthetic", "small", "--head-size", "80", "--kv-dtype", "int8"])
    assert {group.dtype for group in model.model_of(options).groups} == {"i8"}


def test_heads_are_chosen_and_refused() -> None:
    config = synthetic_config("small", head_size=96, kv_heads=1)
    assert shapes_of(config)["model.layers.0.self_attn.k_proj.weight"] == (96, 64)
    assert shapes_of(config)["model.layers.0.self_attn.o_proj.weight"] == (64, 4 * 96)
    with pytest.raises(SettingsError, match="--kv-heads is 3; expected a divisor of the 4 heads"):
        synthetic_config("small", kv_heads=3)


def test_a_hybrid_has_a_layer_of_attention() -> None:
    parser = model.model_options("model", None)
    assert model.config_of(parser.parse_args(["--synthetic", "0.6b-hybrid", "--layers", "8"])).num_layers == 8
    with pytest.raises(SettingsError, match=r"--layers is 7; expected at least 8: every 8th layer of 0\.6b-hybrid is an attention layer"):
        model.config_of(parser.parse_args(["--synthetic", "0.6b-hybrid", "--layers", "7"]))


def test_a_mixture_has_the_layers_that_memory_holds() -> None:
    """A synthetic mixture-of-experts model gets as many layers as fit into memory. A layer of 30b-a3b has 623 million weights, which take
    350 MB with 4 bits per weight and a 16-bit scale per 32 weights."""
    config = synthetic_config("30b-a3b")
    assert [model.most_layers(config, WeightFormat.parse("int4-32"), gigabytes << 30) for gigabytes in (1, 8, 16, 512)] == [1, 8, 20, 48]
    assert model.most_layers(config, WeightFormat.parse("bf16"), 16 << 30) == 5


def test_a_step_reads_the_experts_that_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counted bytes of a step include only the experts that its tokens are routed to: 8 of 128 experts for one token, most experts for
    32 tokens. The counted operations of a token include only the 8 experts of that token."""
    config = synthetic_config("30b-a3b", layers=1)
    assert [round(128 * model.chosen_share(config, tokens)) for tokens in (1, 2, 32, 512)] == [8, 16, 112, 128]
    monkeypatch.setitem(synthetic.SHAPES, "few", (64, 1, 4, 2, 16, 32, VOCAB))
    monkeypatch.setitem(synthetic.MIXTURES, "few", Mixture(num_experts=4, num_chosen=1, size=32))
    made = model.Model(synthetic_config("few"), "bf16", 1)
    assert made.product_bytes(1) == 2 * (64 * 128 + 64 * 64 + 64 * VOCAB + 3 * 64 * 32) + router_bytes(made)
    assert made.product_elements == 64 * 192 + 3 * 64 * 32 + 64 * 4 and made.head_elements == 64 * VOCAB
    assert made.run(made.step(4, 4, 8)).shape == (4, VOCAB)
    made.session.close()


def test_layers_with_a_window_read_no_more_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a layer with an attention window, the counted work includes only the keys and values inside the window. As in gpt-oss, every
    second layer has a window of 128 tokens."""
    monkeypatch.setitem(synthetic.SHAPES, "few", (64, 2, 4, 2, 16, 32, VOCAB))
    monkeypatch.setitem(synthetic.MIXTURES, "few", replace(synthetic.MIXTURES["gpt-oss-shape"], num_experts=4, num_chosen=2, size=32))
    made = model.Model(synthetic_config("few"), "bf16", 1)
    of_a_token = 2 * 2 * 2 * 16  # bytes of keys and values per token: two heads in bf16
    read = [made.work(model.Case(3, 3, context)).num_bytes for context in (128, 4096)]
    assert read[1] - read[0] == 3 * (4096 - 128) * of_a_token
    seen = made.work(model.Case(512, 1, 512)).operations - 2.0 * (made.product_elements * 512 + made.head_elements)
    assert seen == 4 * 4 * 16 * (512 * 512 / 2 + 128 * (512 - 64))
    assert made.run(made.step(4, 4, 200)).shape == (4, VOCAB)
    attention = [w for name, w in kernels.work_of(made, made.step(6, 3, 200)).items() if "attention" in name]
    assert sorted(w.num_bytes for w in attention) == [3 * of_a_token * 129, 3 * of_a_token * 200]
    assert sorted(w.operations for w in attention) == [4 * 4 * 16 * 3 * 2 * 128, 4 * 4 * 16 * 3 * (199 + 200)]
    made.session.close()


def test_a_hybrid_reads_and_writes_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counted bytes of a hybrid model include reading and writing its recurrent state. The model has two layers: the first is
    recurrent, the second has attention."""
    monkeypatch.setitem(synthetic.SHAPES, "few", (64, 2, 4, 2, 16, 32, VOCAB))
    few = Recurrence(frozenset(), taps=4, num_keys=2, num_heads=4, key_size=8, size=16)
    monkeypatch.setitem(synthetic.HYBRIDS, "few", (synthetic.DELTA, few))
    monkeypatch.setattr(synthetic, "ATTENTION_EVERY", 2)
    monkeypatch.setattr(model, "LONG", 8192)
    made = model.Model(synthetic_config("few"), "bf16", 1)
    assert made.product_elements == 64 * (16 * 16) + 64 * (96 + 128 + 8) + 2 * 3 * 64 * 32
    read = [made.work(model.Case(3, 3, context)).num_bytes for context in (128, 4096)]
    assert read[1] - read[0] == 3 * (4096 - 128) * 2 * 2 * 2 * 16
    state_bytes = 4 * (3 * 96 + 64 * 8)
    assert read[0] == made.product_bytes(3) + 3 * (128 * 2 * 2 * 2 * 16 + 2 * state_bytes)
    assert model.Case(1, 1, 8192) in made.works and model.Case(4, 4, 8192) not in made.works
    for case in ((4, 4, 200), (64, 1, 64), (1, 1, 8192)):
        assert np.isfinite(made.session.download(made.run(made.step(*case)))).all()
    monkeypatch.setattr(model, "TURNS", 1)
    assert (model.lengthening(made) or 0) > 0
    made.session.close()


def test_pages_of_a_window_stop_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "few", (64, 2, 4, 2, 16, 32, VOCAB))
    config = replace(synthetic_config("few"), windows=(None, 128))
    made = model.Model(config, "bf16", 1)
    assert [(group.window, group.pages) for group in model.growth(made)] == [(None, [8, 16, 24, 32]), (128, [8, 9, 9, 9])]
    made.session.close()


def test_a_hybrid_with_mamba_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "few", (64, 2, 4, 2, 16, 32, VOCAB))
    family, whole = synthetic.HYBRIDS["0.6b-mamba"]
    monkeypatch.setitem(synthetic.HYBRIDS, "few", (family, replace(whole, num_heads=4, key_size=8, size=16)))
    monkeypatch.setattr(synthetic, "ATTENTION_EVERY", 2)
    monkeypatch.setattr(model, "LONG", 256)
    made = model.Model(synthetic_config("few"), "bf16", 1)
    assert made.product_elements == 64 * 192 + 64 * ((64 + 80 + 4) + 64) + 2 * 3 * 64 * 32
    assert np.isfinite(made.session.download(made.run(made.step(4, 4, 200)))).all()
    made.session.close()


def test_latents_are_counted_with_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is multiplied by the matrices of all heads, and by those of the experts that it chooses."""
    monkeypatch.setitem(synthetic.SHAPES, "few", (64, 2, 4, 1, 40, 32, VOCAB))
    monkeypatch.setitem(synthetic.LATENTS, "few", Latent(32, None, 16, 8, 24))
    monkeypatch.setitem(synthetic.MIXTURES, "few", Mixture(num_experts=8, num_chosen=2, size=32, shared_size=64))
    made = model.Model(synthetic_config("few"), "bf16", 1)
    attention = 64 * (4 * 24 + 40 + 4 * 24) + 4 * 40 * 32
    assert made.product_elements == 2 * (attention + 3 * 64 * (2 * 32 + 64) + 64 * 8)
    whole = made.product_bytes(1 << 20)
    assert whole - made.product_bytes(1) == 2 * 3 * 64 * 32 * 6 * 2
    assert np.isfinite(made.session.download(made.run(made.step(4, 4, 200)))).all()
    made.session.close()


def router_bytes(made: model.Model) -> int:
    (router,) = (a for name, a in made.weights.items() if "mlp.gate" in name)
    return router.nbytes
