"""The attacker finds no template that breaks a promise of the sandbox, and finds those that break one if a defect is put back."""

from __future__ import annotations

import os
import time

import jinja2.filters
import pytest
from jinja2.utils import pass_context

from server.text.templates import filters, meter, sandbox
from server.text.templates.limits import Limits
from server.text.templates.meter import meter_of
from tests.server.text.templates.attacker import EQUAL_HASHES, attack, faults

NUM_SHORT = 60
CAMPAIGN_S = float(os.environ.get("TEMPLATE_ATTACK_S", "1800"))


def check(seed: int, number: int) -> None:
    source, found = attack(seed, number)
    if found:  # other work of this process may disturb one measurement
        source, found = attack(seed, number)
    assert not found, f"seed {seed}, draw {number}: {found}\n{source}"


@pytest.mark.usefixtures("without_collector")
def test_no_template_of_a_short_attack_breaks_a_promise() -> None:
    for number in range(NUM_SHORT):
        check(1, number)


@pytest.mark.slow
@pytest.mark.usefixtures("without_collector")
def test_no_template_of_a_long_attack_breaks_a_promise() -> None:
    """The attack takes 30 minutes, or TEMPLATE_ATTACK_S seconds."""
    end_s, number = time.monotonic() + CAMPAIGN_S, 0
    while time.monotonic() < end_s:
        check(2, number)
        number += 1


@pass_context
def _step(context, num_chars):
    meter_of(context).charge(num_chars)
    return True


def test_the_attack_finds_a_filter_that_refunds_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test puts back the filter `step`, and a meter that takes any number."""
    table = filters.metered_filters()
    monkeypatch.setattr(sandbox, "metered_filters", lambda: {**table, "step": _step})
    monkeypatch.setattr(meter, "_check_count", lambda _number: None)
    found = (fault for number in range(1000) for fault in attack(3, number)[1])
    assert any("refunded" in fault for fault in found)


def test_the_attack_finds_keys_of_equal_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test puts back Jinja's `unique`, which compares each tuple with all others of its hash."""
    table = filters.metered_filters()
    unique = filters._jinja(jinja2.filters.FILTERS["unique"], by_item=True, deep=True)
    limits = Limits(time_s=20.0, memory_bytes=64 << 20)
    source = EQUAL_HASHES + "{% for i in range(5) %}{{ hashes | unique | list | length }}{% endfor %}"
    began_s = time.thread_time()
    assert not faults(EQUAL_HASHES, limits, most_s=20.0)
    most_s = 3 * (time.thread_time() - began_s)
    assert not faults(source, limits, most_s=most_s)
    monkeypatch.setattr(sandbox, "metered_filters", lambda: {**table, "unique": unique})
    assert any("CPU time" in fault for fault in faults(source, limits, most_s=most_s))
