"""The benchmark of serving measures what it claims to measure, tested on the demo model. Speed is not tested."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deploy import demo
from deploy.bench.serving.drive import InProcess
from deploy.bench.serving.ideal import Ideal
from deploy.bench.serving.serve import late_figures, main, measure, options_of, spec_of, stream_figures
from deploy.model_loading.load import load_model
from deploy.model_loading.serving import CompiledModel
from deploy.streams import LATE_AFTER, Prompt, Stream
from server.engine.step_model import GroupLimits, Logits, StepBatch, StepLimits
from server.load_settings import MAX_GAP_MS
from server.messages import Load
from tests.doubles.model import NullModel


def test_figures_of_the_engine(capsys: pytest.CaptureFixture[str]):
    main(["--model", "demo", "--quantize", "bf16", "--clients", "1,3", "--json"])
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}
    for n in (1, 3):
        assert figures[f"{n} clients: throughput"]["value"] > 0
        assert 0 < figures[f"{n} clients: share of time outside kernels"]["value"] < 1
        assert figures[f"{n} clients: time to first token, p50"]["value"] <= figures[f"{n} clients: time to first token, p99"]["value"]
    assert 0 < figures["prefix: time to first token, second prompt / first"]["value"] < 1
    assert not any(name.startswith("arrival") for name in figures), "2,000 tokens do not fit the demo model"
    assert all(figure["goal"] is None for figure in figures.values()), "the goals are for another model"


def test_two_bursts_stand_beside_the_ideal(capsys: pytest.CaptureFixture[str]):
    main(["--model", "demo", "--quantize", "bf16", "--burst", "3", "--json"])
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)}
    for name in ("first burst of 3", "second burst of 3"):
        assert figures[f"{name}: throughput / ideal"] > 0 and figures[f"{name}: throughput / ideal, by CPU time"] > 0
        median, worst = (figures[f"{name}: {which} time to first token / time of all prompts"] for which in ("median", "longest"))
        assert 0 < median <= worst
    assert figures["arrivals at 0.7 of capacity: throughput / ideal"] > 0


def test_no_load_finds_the_prompts_of_another_in_the_prefix_cache(monkeypatch: pytest.MonkeyPatch):
    sent: list[Prompt] = []
    run = InProcess.run

    def recorded(driver: InProcess, prompts: Sequence[Prompt], *others: Any, **options: Any) -> list[Stream]:
        sent.extend(prompts)
        return run(driver, prompts, *others, **options)

    monkeypatch.setattr(InProcess, "run", recorded)
    main(["--model", "demo", "--quantize", "bf16", "--burst", "77", "--length", "8"])
    assert len({prompt.ids for prompt in sent}) == len(sent) == 4 * 77


def test_prompts_arrive_when_they_are_due():
    """A stream begins at its arrival time, whether the engine is computing a step, waiting, or busy with other streams at that time."""
    loaded = load_model(Load("demo", str(demo.MODEL), max_batch=4), lambda _stage, _fraction: None)
    driver = InProcess(loaded, temperature=0.0)
    prompts = [Prompt((5, 6, 7), 4, at_s) for at_s in (0.3, 0.0, 0.001)]
    first, second, last = driver.run(prompts)
    driver.close()
    assert last.began_s - first.began_s == pytest.approx(0.3) and 0 < second.began_s - first.began_s < 0.01
    assert last.times_s[0] > last.began_s
    assert [stream.num_tokens for stream in (first, second, last)] == [4, 4, 4]


class Reading:
    """Work beside the engine, which notes how many tokens the engine has computed. Each call takes 20 ms."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def catch_up(self, num_tokens: int) -> None:
        self.seen.append(num_tokens)
        time.sleep(0.02)


def test_work_beside_the_engine_takes_turns_and_does_not_count():
    loaded = load_model(Load("demo", str(demo.MODEL), max_batch=4), lambda _stage, _fraction: None)
    driver = InProcess(loaded, temperature=0.0)
    prompts = [Prompt((5, 6, 7), 9)]
    for _ in range(2):
        reading, began_s = Reading(), time.perf_counter()
        (stream,) = driver.run(prompts, beside=reading)
        wall_s = time.perf_counter() - began_s
        assert sorted(set(reading.seen)) == list(range(3, 12)), "three tokens of the prompt, then one per step"
        assert stream.times_s[-1] - stream.began_s <= wall_s - 0.02 * len(reading.seen)
    driver.close()


class Recorded(NullModel):
    """A model that notes the number of tokens of each step. A step takes a second of a simulated clock."""

    busy_s = 0.0

    def __init__(self) -> None:
        super().__init__(StepLimits(64, max_context=300, max_tokens=512, max_seqs=8, groups=(GroupLimits(200),)))
        self.sizes: list[int] = []
        self.now_s = 0.0

    def run(self, batch: StepBatch) -> Logits:
        self.sizes.append(len(batch.tokens))
        self.now_s += 1.0
        return super().run(batch)


def test_the_ideal_keeps_up_with_the_engine(monkeypatch: pytest.MonkeyPatch):
    """Six prompts are computed in one step of four and one of two. Then 127 steps decode all of them."""
    model = Recorded()
    clock = SimpleNamespace(perf_counter=lambda: model.now_s, process_time=lambda: 0.0)
    monkeypatch.setattr("deploy.bench.serving.ideal.time", clock)
    ideal = Ideal.of_clients(cast("CompiledModel", model), 6)
    done: list[int] = []
    for num_tokens in (511, 512, 767, 768 + 11, 768 + 12):
        ideal.catch_up(num_tokens)
        done.append(sum(model.sizes))
    assert done == [0, 512, 512, 768 + 6, 768 + 12]
    took = ideal.run()
    assert model.sizes == [512, 256, *[6] * 127]
    assert (took.prompts_s, took.decoding_s, took.wall_s) == (2.0, 127.0, 129.0)


def test_a_prompt_alone_keeps_up_with_the_engine():
    """The model computes 250 tokens in chunks of 100. Each chunk runs once the engine has computed as many tokens since the prompt
    arrived."""
    model = Recorded()
    alone = Ideal.of_prompt(cast("CompiledModel", model), 250, 100)
    for num_tokens, done in ((99, []), (116, [100]), (232, [100, 100]), (300, [100, 100, 50])):
        alone.catch_up(num_tokens)
        assert model.sizes == done


def test_work_beside_a_late_prompt_begins_when_it_arrives():
    loaded = load_model(Load("demo", str(demo.MODEL), max_batch=4), lambda _stage, _fraction: None)
    driver, reading = InProcess(loaded, temperature=0.0), Reading()
    stream, late = driver.run([Prompt((5, 6, 7), LATE_AFTER + 9)], late=Prompt((5,) * 20, 1), beside=reading)
    driver.close()
    assert reading.seen[0] in (1, 21), "the step after the arrival computes a token of the stream, and maybe the late prompt"
    assert reading.seen[-1] <= 20 + 9 < stream.num_tokens and late.num_tokens == 1


@pytest.mark.parametrize("lengths", [(), (4,), (4, LATE_AFTER + 9)], ids=["none", "short", "short and long"])
def test_a_late_prompt_is_sent_after_streams_of_any_length(lengths: tuple[int, ...]):
    """As over HTTP, the late prompt does not wait for a stream that has ended."""
    loaded = load_model(Load("demo", str(demo.MODEL), max_batch=4), lambda _stage, _fraction: None)
    driver = InProcess(loaded, temperature=0.0)
    *streams, late = driver.run([Prompt((5, 6, 7), length) for length in lengths], late=Prompt((5,) * 20, 2))
    driver.close()
    assert [stream.num_tokens for stream in (*streams, late)] == [*lengths, 2]
    assert all(stream.times_s[min(length, LATE_AFTER) - 1] <= late.began_s for stream, length in zip(streams, lengths, strict=True))


def test_http_without_numbers_of_clients_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--model", "demo", "--burst", "2", "--http"])
    assert "--http measures --clients" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "nan"], "nan is not a number of at least 0"),
        (["--temperature", "-1"], "-1 is not a number of at least 0"),
        (["--device", "gpu"], "gpu is no device; expected cpu, cuda, or one of several GPUs as cuda:1"),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--model", "demo", *options])
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_the_device_reaches_the_engine_and_the_server(monkeypatch: pytest.MonkeyPatch):
    class Loading(Exception):
        pass

    def load(given: Load, _: object):
        raise Loading(given.device)

    monkeypatch.setattr("deploy.bench.serving.serve.load_model", load)
    options = options_of("serve", None).parse_args(["--device", "cuda:1"])
    with pytest.raises(Loading, match="cuda:1"):
        measure(demo.MODEL, options)
    assert spec_of(demo.MODEL, options).device == "cuda:1"


def stream(began_s: float, times_s: Sequence[float]) -> Stream:
    return Stream(began_s, len(times_s), list(times_s))


def test_percentiles_and_throughput():
    streams = [stream(0.0, [1.0, 1.5, 3.0]), stream(0.0, [2.0, 3.0, 4.0])]
    values = {figure.name.removeprefix("x: "): figure.value for figure in stream_figures("x", streams)}
    assert values["throughput"] == 6 / 4.0
    assert values["time to first token, p99"] == 2000
    assert values["time between tokens, p50"] == 1000 and values["time between tokens, p99"] == 1500


def test_what_a_late_prompt_costs_the_others():
    """The cost of a late prompt is the longest gap between tokens of the other streams. Here the gap is 3 s while the prompt is computed,
    and 1 s otherwise. Gaps before all streams have started are ignored."""
    others = [stream(0.0, [1, 2, 3, 4, 7, 8, 9]), stream(0.0, [2.5, 3.5, 4.5, 6.5, 7.5, 8.5])]
    late = stream(4.2, [7.0])
    gap, first = late_figures(others, late, 1.75, "")
    assert gap.value == 3000 and gap.goal == MAX_GAP_MS and gap.reached is False
    assert first.value == pytest.approx(1.6) and first.reached is False


def test_streams_of_one_text_have_no_time_between_tokens():
    """Over HTTP, all other tokens of a stream may have no text."""
    names = [figure.name for figure in stream_figures("x", [Stream(0.0, 9, [1.0])])]
    assert names == ["x: throughput", "x: time to first token, p50", "x: time to first token, p99"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--burst", "4", "--clients", "1,2"], "--burst measures only its own number of clients: leave out --clients or --burst"),
        (["--burst", "4", "--http"], "--http measures --clients: leave out --burst"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err
