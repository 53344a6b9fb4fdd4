"""`relaxserve bench fleet` simulates fleets, compares policies, measures costs, and refuses wrong options and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench.fleet.costs import read
from deploy.bench.fleet.policies import POLICIES
from deploy.bench.serving.fleet import main


def figures(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, float]:
    main(["--simulate", "--json", "--minutes", "2", *options])
    return {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)}


def test_a_simulation_reports_what_clients_see(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--rate", "3", "--replicas", "2", "--price", "2")
    assert found["requests"] == pytest.approx(360, rel=0.15)
    assert found["requests without an answer"] == 0
    assert 0 < found["first token, median"] < found["first token, p99"]
    dear = figures(capsys, "--rate", "3", "--replicas", "2", "--price", "4")
    assert dear["cost"] == pytest.approx(2 * found["cost"])


def test_policies_are_compared_on_one_trace(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--trace", "sessions", "--rate", "4", "--replicas", "4", "--policy", "all")
    assert len({found[f"{policy}: requests"] for policy in POLICIES}) == 1
    assert found["prefix: prefix hits"] > found["round-robin: prefix hits"]


def test_less_memory_means_fewer_prefix_hits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--trace", "sessions", "--rate", "4", "--replicas", "4")
    assert figures(capsys, *options, "--capacity", "4000")["prefix hits"] < 0.9 * figures(capsys, *options)["prefix hits"]


def test_a_machine_that_is_shared_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    alone, shared = figures(capsys, "--rate", "0.2"), figures(capsys, "--rate", "0.2", "--slowdown", "2")
    for name in ("first token, median", "token, median"):
        assert shared[name] == pytest.approx(2 * alone[name], rel=0.05)


def test_a_cell_fails(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--rate", "16", "--cells", "2", "--replicas", "4")
    whole, failed = figures(capsys, *options), figures(capsys, *options, "--fail", "0")
    assert failed["requests without an answer"] == 0
    assert failed["objective met"] < whole["objective met"]


def test_as_many_replicas_fail_as_a_cell_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    """If --fail-replicas is left out, all of them fail, also those that the load has added."""
    options = ("--rate", "16", "--replicas", "2", "--most-replicas", "10", "--fail", "0")
    two, ten, left_out = (figures(capsys, *options, *more) for more in (("--fail-replicas", "2"), ("--fail-replicas", "10"), ()))
    assert left_out == ten != two


def test_costs_are_measured_and_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--measure", "--model", "demo"])
    path = tmp_path / "costs.json"
    path.write_text(capsys.readouterr().out)
    costs = read(path)
    assert min(costs.prompt) == min(costs.decode) == 1
    assert max(costs.prompt) == costs.max_tokens
    assert all(seconds > 0 for seconds in (*costs.prompt.values(), *costs.decode.values()))
    assert figures(capsys, "--costs", str(path), "--rate", "20")["requests"] > 2000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say --simulate, or --measure"),
        (["--simulate", "--measure"], "argument --measure: not allowed with argument --simulate"),
        (["--simulate", "--rate", "0"], "0 is not a number above 0"),
        (["--simulate", "--rate", "nan"], "nan is not a number above 0"),
        (["--simulate", "--rate", "x"], "x is not a number above 0"),
        (["--simulate", "--replicas", "2.5"], "2.5 is not a whole number above 0"),
        (["--simulate", "--rate", "1e9"], "expected at most 2000000"),
        (["--simulate", "--rate", "3000", "--prompt", "10000"], "more than 1000000000 tokens of prompts"),
        (["--simulate", "--fail", "3"], "--fail is 3; expected a cell from 0 to 0"),
        (["--simulate", "--fail", "0", "--fail-replicas", "3"], "--fail-replicas is 3; expected at most 2, the replicas of a cell"),
        (["--simulate", "--fail-replicas", "1"], "--fail-replicas is 1, and --fail is not set; say which cells fail"),
        (["--simulate", "--patience", "3"], "--patience is 3, and --network is not set; set both, or leave --patience out"),
        (["--simulate", "--fail-s", "9"], "--fail-s is 9, and --fail is not set; set both, or leave --fail-s out"),
        (["--simulate", "--prefill-tokens", "9"], "--prefill-tokens is 9, and --network is not set"),
        (["--simulate", "--target-requests", "8"], "--target-requests is 8, and --most-replicas is not set"),
        (["--simulate", "--costs", "nowhere"], "expected what `relaxserve bench fleet --measure` prints"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(options)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_measured_sizes_may_come_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"prompt":{"16":2,"1":1},"decode":{"4":2,"1":1},"context_s":0,"pair_s":0}')
    assert read(path).step_s(16, 0, 0) == 2.0
    assert [*read(path).decode] == [1, 4]


WHOLE = {"prompt": {"1": 1}, "decode": {"1": 1}, "context_s": 0, "pair_s": 0}
ABOVE = "expected costs of prompts and of decoding, and limits, all above 0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**WHOLE, "prompt": {}}), ABOVE),
        (json.dumps({**WHOLE, "prompt": {"1": 0}}), ABOVE),
        (json.dumps({**WHOLE, "prompt": {"0": 1}}), ABOVE),
        (json.dumps({**WHOLE, "context_s": -1}), ABOVE),
        (json.dumps({**WHOLE, "capacity": 0}), ABOVE),
        (json.dumps({**WHOLE, "max_seqs": 600}), "max_seqs is 600; expected at most max_tokens, 512"),
        *(
            (json.dumps({key: value for key, value in WHOLE.items() if key != name}), f"{name} is missing; expected the seconds of")
            for name in ("context_s", "pair_s")
        ),
        ('{"prompt":{"1":1}}', "missing required field `decode`"),
        ("[]", "Expected `object`"),
        ("{", "truncated"),
    ],
)
def test_files_that_are_no_costs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"costs\.json: .*{message}"):
        read(path)
