"""The cost of a fleet is the difference from its own replica, and its throughput is a share of the server's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deploy.streams import Prompt, Stream
from tests.lab.serving.ray_fleet import NUM_ALONE, Alone, Round, _alone, figures_of, main, prompts, run_round


@dataclass
class Played:
    """A target whose first event of every second prompt has two tokens, because the first of them has no text. A token takes a second."""

    way_s: float = 0.0
    seen: list[Prompt] = field(default_factory=list[Prompt])

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        assert late is None
        self.seen += prompts
        return [self._stream(prompt) for prompt in prompts]

    def _stream(self, prompt: Prompt) -> Stream:
        num_at_first = 1 + prompt.ids[0] % 2
        times_s = [self.way_s + number for number in range(num_at_first, prompt.num_new + 1)]
        return Stream(0.0, prompt.num_new, times_s, num_at_first)


def test_the_way_through_the_fleet_is_told_from_its_fewer_threads() -> None:
    rounds = [Round(Alone(40.0, 5.0), Alone(70.0, 6.0), Alone(70.0 + added, 6.1), 200.0, 190.0) for added in (2.0, 3.0, 9.0)]
    found = {figure.name: figure.value for figure in figures_of(rounds, 32)}
    assert found["added time to the first token"] == pytest.approx(3.0)
    assert found["added time per token"] == pytest.approx(0.1)
    assert found["first token beside a server with all cores"] == pytest.approx(33.0)
    assert found["throughput, 32 clients"] == pytest.approx(0.95)


def test_all_targets_get_the_same_prompts() -> None:
    """The number of tokens before the first text depends on the prompt, so that other prompts would show a difference of whole tokens."""
    for number in range(6):
        server, fleet, replicas = Played(), Played(way_s=0.25), [Played(), Played()]
        found = run_round(server, replicas, fleet, number, num_clients=4, num_new=8)
        asked = [prompt for pair in zip(*(replica.seen for replica in replicas), strict=True) for prompt in pair]
        assert server.seen[:NUM_ALONE] == asked == fleet.seen[:NUM_ALONE]
        assert server.seen[NUM_ALONE:] == fleet.seen[NUM_ALONE:]
        assert found.fleet.first_ms - found.replica.first_ms == pytest.approx(250.0)
        assert found.fleet.token_ms == found.replica.token_ms == pytest.approx(1000.0)


def test_streams_with_one_event_have_no_time_per_token() -> None:
    """The whole answer may come with one event, if no token before the last one completes a character."""
    streams = [Stream(0.0, 8, [9.0], 8), Stream(0.0, 8, [1.0, 8.0]), Stream(0.0, 8, [2.0], 8)]
    assert _alone(streams) == Alone(2000.0, 1000.0)
    assert math.isnan(_alone(streams[:1]).token_ms)


def test_too_few_tokens_are_refused_before_a_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens", "1"])
    assert "--tokens is 1, expected at least 8" in capsys.readouterr().err


def test_no_two_prompts_begin_alike() -> None:
    sent = [prompt.ids[:16] for seed in ("0 alone 0", "0 alone 1", "0 together") for prompt in prompts(seed, 8, 1)]
    assert len({*sent}) == len(sent)
