"""The cost of a fleet is the difference from its own replica, and its throughput is a share of the server's."""

from __future__ import annotations

import pytest

from tests.lab.serving.ray_fleet import Alone, Round, figures_of, prompts


def test_the_way_through_the_fleet_is_told_from_its_fewer_threads() -> None:
    rounds = [Round(Alone(40.0, 5.0), Alone(70.0, 6.0), Alone(70.0 + added, 6.1), 200.0, 190.0) for added in (2.0, 3.0, 9.0)]
    found = {figure.name: figure.value for figure in figures_of(rounds, 32)}
    assert found["added time to the first token"] == pytest.approx(3.0)
    assert found["added time per token"] == pytest.approx(0.1)
    assert found["first token beside a server with all cores"] == pytest.approx(33.0)
    assert found["throughput, 32 clients"] == pytest.approx(0.95)


def test_no_two_prompts_begin_alike() -> None:
    sent = [prompt.ids[:16] for seed in ("0 alone 0 0", "0 alone 0 1", "1 0") for prompt in prompts(seed, 8, 1)]
    assert len({*sent}) == len(sent)
