"""Peers on GPUs run in a process of their own. Stand-ins take the place of their packages: they show that the peer gets the right weights
and steps, and say nothing about speed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy.bench.compute.case import Case
from deploy.bench.compute.model import Model
from deploy.bench.limits import Limits
from deploy.bench.synthetic import llama_config, synthetic_config
from server.settings import SettingsError
from tests.lab import card_peer
from tests.lab.compute.model import CardSubject, Compared, measure_on_card

CONFIG = llama_config(64, 2, 4, 2, 16, 96, 128)
CASES = (Case(16, 1, 16), Case(3, 3, 40))


@pytest.fixture(scope="module")
def subject() -> CardSubject:
    """Return a model with our own logits, computed on the CPU."""
    ours = Model(CONFIG, "bf16", 1)
    logits = np.array(ours.session.download(ours.prepared(*CASES[0])()))
    works = {case: ours.work(case) for case in CASES}
    ours.session.close()
    return CardSubject(CONFIG, works, logits, Limits(1e9, 1e12), "cuda:1", sys.executable)


def test_torch_runs_the_same_model_eager_and_compiled(subject: CardSubject, stand_ins: Path) -> None:
    found = dict(measure_on_card(["torch"], subject))
    assert list(found) == ["torch eager", "torch compiled"]
    for compared in found.values():
        assert isinstance(compared, Compared), compared
        assert compared.difference < 0.02, "only the rounding of bf16 differs"
        assert compared.version == "0.1"
        assert [row.name for row in compared.rows] == ["prefill 16", "decode 3 x 40"]
        assert [row.tokens_per_s for row in compared.rows] == pytest.approx([16e3, 3e3]), "the stand-in's step takes a millisecond"
    lines = stand_ins.read_text().splitlines()
    pages = "zeros 2 2 {} 2 {} 16 bfloat16 cuda"  # layers, keys and values, sequences, heads, context, head size
    assert [line for line in lines if line.startswith("zeros")] == 2 * [pages.format(*sizes) for sizes in ((1, 16), (1, 16), (3, 40))]
    assert lines.count("compile _logits reduce-overhead False") == 3
    assert lines.count("record") == 2 * 2 * (1 + 2 * card_peer.ROUNDS), "two events around each measured run"


def test_vllm_answers_prompts_of_the_steps_lengths(subject: CardSubject, stand_ins: Path) -> None:
    ((kind, compared),) = measure_on_card(["vllm"], subject)
    assert kind == "vllm" and isinstance(compared, Compared) and all(row.tokens_per_s > 0 for row in compared.rows)
    made, *calls = (line.split(maxsplit=3 if line.startswith("generate") else 2) for line in stand_ins.read_text().splitlines())
    settings = json.loads(made[2])
    assert made[1] == "1" and settings["max_model_len"] == 40 + 33 and settings["max_num_seqs"] == 3
    assert not settings["enable_prefix_caching"] and settings["skip_tokenizer_init"]
    asked = {(int(count), int(length), json.loads(params)["max_tokens"]) for _, count, length, params in calls}
    assert asked == {(1, 16, 1), (1, 16, 33), (3, 24, 1), (3, 24, 33)}
    assert [params["logprobs"] for *_, text in calls if "logprobs" in (params := json.loads(text))] == [20]


def test_a_peer_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(card_peer.CARD_PEERS, "absent", card_peer.Package("no_such_engine", ("absent",)))
    with pytest.raises(SettingsError, match=r"'absent' is not installed for .*-m pip install no_such_engine, or .*--peer-python"):
        card_peer.check("absent", "bf16", CONFIG, sys.executable)
    with pytest.raises(SettingsError, match=r"'torch' needs an interpreter, and /nowhere/python cannot be run .*--peer-python"):
        card_peer.check("torch", "bf16", CONFIG, "/nowhere/python")


def test_a_model_that_a_peer_cannot_run_is_refused() -> None:
    with pytest.raises(SettingsError, match="'openvino' does not run on GPUs; the peers on GPUs are torch, vllm"):
        card_peer.check("openvino", "bf16", CONFIG, sys.executable)
    with pytest.raises(SettingsError, match="supports the weight format bf16 on GPUs, not int8"):
        card_peer.check("vllm", "int8", CONFIG, sys.executable)
    with pytest.raises(SettingsError, match="runs shapes of the family llama, not qwen3_moe"):
        card_peer.check("torch", "bf16", synthetic_config("30b-a3b"), sys.executable)


def test_a_peer_that_fails_is_named_and_the_next_one_runs(subject: CardSubject, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_GPU", "0")
    found = dict(measure_on_card(["torch", "vllm"], replace(subject, works={CASES[0]: subject.works[CASES[0]]})))
    for kind in ("torch eager", "torch compiled"):
        assert str(found[kind]) == f"{kind} failed: RuntimeError: torch finds no GPU; install a build of torch for CUDA"
    assert isinstance(found["vllm"], Compared)


def test_a_process_that_ends_is_an_error(subject: CardSubject, stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_STATUS", "3")
    ((_, error),) = measure_on_card(["vllm"], subject)
    assert str(error) == "the process of vllm ended with status 3; its output is above"


def test_another_model_is_noticed(subject: CardSubject, stand_ins: Path) -> None:
    found = dict(measure_on_card(["torch"], replace(subject, logits=-subject.logits)))
    assert "differ from ours by 200%: it does not run the same model" in str(found["torch eager"])


def test_the_peer_gets_the_gpu_that_is_listed() -> None:
    assert [card_peer.visible(device, {}) for device in ("cuda", "cuda:2")] == ["0", "2"]
    assert card_peer.visible("cuda:1", {"CUDA_VISIBLE_DEVICES": "4,6"}) == "6"
