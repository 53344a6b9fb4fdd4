"""The delay before a worker starts grows with the number of workers that died early."""

from __future__ import annotations

from server.workers.care import Care, EarlyDeaths


def test_delays_are_capped_and_short_after_kills_from_outside() -> None:
    deaths, delays = EarlyDeaths(Care()), dict[int, tuple[float, float]]()
    for number in range(1, 2000):
        deaths.count()
        delays[number] = deaths.delay_s(killed=False), deaths.delay_s(killed=True)
    expected = {1: (0.0, 0.0), 2: (0.1, 0.1), 3: (0.2, 0.2), 4: (0.4, 0.4), 9: (5.0, 0.5), 1999: (5.0, 0.5)}
    assert {number: delays[number] for number in expected} == expected


def test_a_worker_that_lived_long_or_produced_something_begins_anew() -> None:
    care = Care(settled_s=30.0)
    for clear in (lambda deaths: deaths.count(30.1), lambda deaths: deaths.clear()):
        deaths = EarlyDeaths(care)
        for _ in range(5):
            deaths.count(lived_s=29.9)
        assert deaths.delay_s(killed=False) > 0
        clear(deaths)
        assert deaths.delay_s(killed=False) == 0
