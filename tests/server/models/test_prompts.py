"""The latest prompts tell where a new prompt departs from them."""

from __future__ import annotations

import pytest

from server.models import prompts
from server.models.prompts import LatestPrompts, num_shared


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 4097, 9999])
def test_the_common_beginning_is_exact(at: int) -> None:
    text = "ab" * 5000
    assert num_shared(text, text[:at] + "x" + text[at:]) == at
    assert num_shared(text, text[:at]) == num_shared(text[:at], text) == at


def test_a_prompt_that_continues_an_earlier_one_replaces_it() -> None:
    latest, history = LatestPrompts(), "question " * 50
    assert latest.difference("", history) is None
    for turn in range(3):
        history += f"answer and question {turn} " * 20
        assert latest.difference("", history + "<open>") is None, "the next turn may write the end of a prompt otherwise"
    assert len(latest._prompts) == 1
    assert latest.difference("", history[:100] + "other" + history[100:]) == 100
    assert latest.difference("", history) is None, "the earlier prompt is still known"


def test_tenants_learn_nothing_of_each_other() -> None:
    latest = LatestPrompts()
    assert latest.difference("a", "x" * 500) is None
    assert latest.difference("b", "x" * 300 + "y" * 200) is None
    assert latest.difference("a", "x" * 200 + "y" * 300) == 200


def test_few_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_CHARS", 3000)
    latest = LatestPrompts()
    for number in range(100):
        latest.difference("", f"{number:03}" + "x" * 997)
        assert latest._num_chars == sum(len(text) for _, text in latest._prompts) <= 3000
    assert len(latest._prompts) == 3
    assert latest.difference("", "y" * 4000) is not None and not latest._prompts, "a longer prompt than all is not remembered"
    monkeypatch.setattr(prompts, "MOST_CHARS", 1 << 20)
    for number in range(100):
        latest.difference("", f"{number:03}" + "x" * 997)
    assert len(latest._prompts) == prompts.MOST_PROMPTS
