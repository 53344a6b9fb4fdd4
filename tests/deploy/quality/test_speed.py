"""The speed of a form, and what `inspect --quality` says of speed and quality."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deploy import demo, streams
from deploy.cli.commands import app
from deploy.forms import ServedForm, fastest_without_loss
from deploy.quality import measure, speed
from deploy.quality.measure import label_of
from deploy.quality.speed import LEAST_DECODED, NUM_BEFORE, NUM_DECODED, NUM_FIRST, ROUND_S, Quality, Speed, quality_of, speed_at
from deploy.served import served
from deploy.streams import Prompt, Stream
from server.api.answer.sse import EventStream, Framing
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, QualityLabel
from server.models.processes import Usage, usage_of
from server.models.state import ModelSpec
from server.process_state import fields_of
from server.text.detokenize import Detokenizer
from tests.conftest import ROOT, descendants_of
from tests.server.conftest import serve, with_answer

__all__ = ["serve"]

LOAD = Load("demo", str(demo.MODEL), "bf16")
DELAY_S = 0.02
TEXT = list(range(64, 250))  # tokens of a prompt

pytestmark = pytest.mark.xdist_group("quality")  # the tests of this group share compiled models


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(speed, "SETTLED_S", 0.0)
        yield


# --- the parts of a request that count -----------------------------------------------------------------------------------


def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **options: Any) -> Any:
        time.sleep(DELAY_S)
        return call(*args, **options)

    return late


@pytest.mark.parametrize(
    ("place", "name"),
    [(Detokenizer, "push"), (Framing, "frame"), (EventStream, "_send"), (streams, "_chunk"), (None, "the worker")],
    ids=["detokenizer", "event", "HTTP", "client", "worker"],
)
def test_the_time_of_each_part_of_a_request_counts(place: Any, name: str, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = with_answer("x" * 300, max_context=16, interval_s=DELAY_S if place is None else 0.0)
    server = serve(script=script)
    if place is not None:
        monkeypatch.setattr(place, name, delayed(getattr(place, name)))
    found = speed_at(server.url, "null", TEXT)
    assert found.tokens_per_s <= 1 / DELAY_S, f"{name} takes {DELAY_S} s for each token"


def test_each_request_is_that_of_one_client(serve: Any) -> None:
    server = serve(script=with_answer("x" * 300))
    found = speed_at(server.url, "null", TEXT)
    submits = server.worker.submits
    assert {submit.prompt_ids for submit in submits} == {tuple(TEXT[:NUM_BEFORE])}
    assert [submit.params.max_tokens for submit in submits] == [NUM_FIRST] + speed.ROUNDS * [found.num_decoded]
    assert all(submit.params.ignore_eos and submit.num_choices == 1 for submit in submits)


# --- the figure ----------------------------------------------------------------------------------------------------------


class Scripted:
    """Answers one request after another, each with a number of tokens per second of its own."""

    def __init__(self, rates: Sequence[float], max_context: int) -> None:
        self.prompts: list[Prompt] = []
        self.max_context = max_context
        self._rates = iter(rates)

    def get(self, path: str) -> dict[str, int]:
        assert path == "/v1/models/model"
        return {"max_model_len": self.max_context}

    def run(self, prompts: Sequence[Prompt]) -> list[Stream]:
        (prompt,) = prompts
        self.prompts.append(prompt)
        rate = next(self._rates)
        return [Stream(0.0, prompt.num_new, [7.0 + number / rate for number in range(prompt.num_new)])]

    def measured(self, monkeypatch: pytest.MonkeyPatch) -> Speed:
        monkeypatch.setattr(speed, "OverHttp", lambda *_args, **_options: self)
        monkeypatch.setattr(speed, "Client", lambda *_args: self)
        return speed_at("http://127.0.0.1:1", "model", TEXT)


def test_the_speed_is_the_median_after_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Scripted([3.0, 100.0, 2.0, 102.0, 101.0, 5000.0], 512).measured(monkeypatch)
    assert found.tokens_per_s == pytest.approx(101.0)


class Working:
    """Processes that use a core until they have used `work_s`, on a clock that only `sleep` advances."""

    def __init__(self, work_s: float) -> None:
        self.now_s = 0.0
        self._work_s = work_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def usage_of(self, pid: int) -> Usage:
        assert pid == os.getpid()
        return Usage(cpu_s=3.0 + min(self.now_s, self._work_s))


@pytest.mark.parametrize(("work_s", "waited_s"), [(0.0, speed.LOOK_S), (2.0, 2.0 + speed.LOOK_S), (1e9, speed.MOST_S)])
def test_requests_wait_until_the_processes_of_the_server_rest(work_s: float, waited_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    working, began_s = Working(work_s), list[float]()
    monkeypatch.setattr(speed, "usage_of", working.usage_of)
    monkeypatch.setattr(speed.time, "sleep", working.sleep)
    scripted = Scripted([100.0] * 6, 512)
    run = scripted.run

    def noted(prompts: Sequence[Prompt]) -> list[Stream]:
        began_s.append(working.now_s)
        return run(prompts)

    monkeypatch.setattr(scripted, "run", noted)
    scripted.measured(monkeypatch)
    assert began_s == [0.0] + [waited_s] * speed.ROUNDS


def test_the_use_of_a_server_is_that_of_processes_below() -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    before_s = usage_of(os.getpid()).cpu_s
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert usage_of(os.getpid()).cpu_s >= before_s + 0.15
        process.communicate("\n")


@pytest.mark.parametrize(("max_context", "expected"), [(3, (1, 2)), (4, (2, 2)), (64, (32, 32)), (512, (NUM_BEFORE, NUM_DECODED))])
def test_requests_fit_into_the_context(max_context: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Scripted([1e4] * 6, max_context).measured(monkeypatch)
    assert (found.num_before, found.num_decoded) == expected


@pytest.mark.parametrize(("rate", "expected"), [(0.1, LEAST_DECODED), (40.0, round(40 * ROUND_S)), (1e4, NUM_DECODED)])
def test_slow_models_generate_fewer_tokens(rate: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Scripted([rate] * 6, 512)
    assert driver.measured(monkeypatch).tokens_per_s == pytest.approx(rate)
    assert [prompt.num_new for prompt in driver.prompts] == [NUM_FIRST] + 5 * [expected]


def test_answers_without_text_have_no_speed(serve: Any) -> None:
    server = serve(script=with_answer(b"", max_context=16))
    server.script.answer = lambda _submit, _choice: [[257]] * 20  # a special token
    with pytest.raises(LoadError, match="8 tokens that follow a text have no text themselves"):
        speed_at(server.url, "null", TEXT)


def test_first_tokens_without_text_are_no_part_of_a_speed(serve: Any) -> None:
    """Neither the tokens before the first event with text nor the time that they take are counted."""
    server = serve(script=with_answer(b"", max_context=16, interval_s=DELAY_S))
    server.script.answer = lambda _submit, _choice: [[257]] * 5 + [[ord("x")]] * 15
    speed = speed_at(server.url, "null", TEXT)
    assert speed.num_decoded == 8
    assert speed.tokens_per_s < 3 / DELAY_S, "with all 8 tokens, of which the last 3 have text, it is 3.5 / DELAY_S"


def test_a_request_that_fails_is_a_load_error(serve: Any) -> None:
    server = serve(script=with_answer("x" * 300, fail_after=4))
    with pytest.raises(
        LoadError, match="the speed cannot be measured: the server reports within a stream: the script ends in an error here"
    ):
        speed_at(server.url, "null", TEXT)


# --- the server ----------------------------------------------------------------------------------------------------------


def test_a_form_is_served_while_its_speed_is_measured() -> None:
    stages: list[str] = []
    before = set(descendants_of(os.getpid()))  # servers of other tests
    found = quality_of(LOAD, lambda stage, _done: stages.append(stage))
    assert found.label == label_of(LOAD) and found.speed.tokens_per_s > 0
    assert stages.index("measure") < stages.index("start a server") < stages.index("measure the speed")
    assert not any(b"deploy.worker" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in set(descendants_of(os.getpid())) - before)


def test_limits_of_a_load_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[ModelSpec] = []

    def refuse(spec: ModelSpec, log_level: str) -> None:
        specs.append(spec)
        raise LoadError(ErrorCode.LOAD_REFUSED, "no server here")

    monkeypatch.setattr(speed, "served", refuse)
    with pytest.raises(LoadError, match="no server here"):
        quality_of(msgspec.structs.replace(LOAD, max_context=128, kv_dtype="int8", label=True))
    (spec,) = specs
    assert (spec.max_context, spec.kv_dtype, spec.quantize, spec.source, spec.label) == (128, "int8", "bf16", str(demo.MODEL), False)
    monkeypatch.setattr(measure, "_measured", None)  # the label was kept
    assert label_of(msgspec.structs.replace(LOAD, kv_dtype="int8")).kl_divergence > 0


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    with pytest.raises(LoadError, match="nowhere"), served(ModelSpec("broken", "/nowhere/at/all"), log_level="error"):
        pass


def test_the_server_ends_with_the_process_that_measures(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from deploy.served import served\n"
        "from server.models.state import ModelSpec\n"
        "if __name__ == '__main__':\n"
        "    with served(ModelSpec('demo', sys.argv[1], 'bf16')) as url:\n"
        "        print(url, flush=True)\n"
        "        time.sleep(600)\n"
    )
    (tmp_path / "measuring.py").write_text(script)
    command = [sys.executable, str(tmp_path / "measuring.py"), str(demo.MODEL)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(b"http://")
            below = descendants_of(process.pid)
            assert len(below) >= 2, "a front and a worker"
        finally:
            process.send_signal(signal.SIGKILL)
    end_s = time.monotonic() + 60
    while left := [pid for pid in below if _runs(pid)]:
        assert time.monotonic() < end_s, f"{left} outlive the process that started them"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return fields_of(pid)[0] != "Z"
    except FileNotFoundError:
        return False


# --- what commands say ----------------------------------------------------------------------------------------------------


def quality(divergence: float, tokens_per_s: float) -> Quality:
    return Quality(QualityLabel(divergence, 0.99, 10.0, 10.0, 2000), Speed(tokens_per_s, 128, 128))


def test_the_fastest_form_without_loss_is_recommended() -> None:
    def best(qualities: Mapping[str, Quality]) -> str | None:
        found = fastest_without_loss([ServedForm(name, 1, 1, 1, True, 0.0) for name in ("auto", "f32", "bf16", "int8")], qualities)
        return found and found.quantize

    assert best({"auto": quality(5e-4, 90), "f32": quality(0.0, 20), "int8": quality(5e-3, 100)}) == "auto"
    assert best({"f32": quality(5e-3, 20), "int8": quality(4e-3, 100)}) == "int8"
    assert best({}) is None


def test_inspect_shows_and_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr("deploy.forms.FORMS", ("bf16",))
    runner = CliRunner(env={"COLUMNS": "300"})
    shown = runner.invoke(app, ["inspect", str(demo.MODEL), "--quality"], catch_exceptions=False).output
    assert all(word in shown for word in ("tokens/s of one client", "KL", "top-1", "recommended"))
    assert "one client on this machine gets over HTTP" in shown and f"after a prompt of {NUM_BEFORE} tokens" in shown
    monkeypatch.setattr("deploy.forms.FORMS", ("auto", "bf16", "f32"))
    found = json.loads(runner.invoke(app, ["inspect", str(demo.MODEL), "--quality", "--json"], catch_exceptions=False).stdout)
    by_name = {one["quantize"]: one["quality"] for one in found["forms"]}
    assert by_name["f32"]["kl_divergence"] < by_name["bf16"]["kl_divergence"] and by_name["bf16"]["tokens_per_s"] > 0
    assert (by_name["bf16"]["num_before"], by_name["bf16"]["num_decoded"]) == (NUM_BEFORE, NUM_DECODED)
    assert found["recommended"] in by_name
