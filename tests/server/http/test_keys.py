"""A line of a key file states a key and its limits, and the server holds the key to these limits."""

from __future__ import annotations

import os

import pytest

from server.errors import ApiError
from server.http import keys
from server.http.keys import KeyLimits, KeyRing, read_line
from server.http.rates import KeyUse, Rates
from server.settings import SettingsError

KEY = "a-key-of-a-client"


def test_a_line_has_a_group_models_and_rates():
    known = read_line(
        f"{KEY}  model=qwen* group=team model=smollm2 requests_per_minute=60 tokens_per_minute=9000 concurrent_requests=4", "x"
    )
    assert known.tenant == "group/team" and known.digest == read_line(KEY, "x").digest
    assert known.limits == KeyLimits(("qwen*", "smollm2"), 60, 9000, 4)
    assert [known.limits.allow(name) for name in ("qwen", "qwen2.5:7b", "smollm2", "smollm22", "Qwen")] == [True, True, True, False, False]
    assert read_line(KEY, "x").limits.allow("anything")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("modle=qwen", "modle= behind a key, which is no limit; expected KEY group=NAME model=PATTERN requests_per_minute=N"),
        ("model=", "model=; expected a name of a model"),
        ("model=a,b", "model=a,b; expected a name of a model, in which * stands for any text; repeat model="),
        ("requests_per_minute=0", "requests_per_minute=0; expected one number from 1 to"),
        ("requests_per_minute=1.5", "requests_per_minute=1.5; expected one number"),
        ("tokens_per_minute=9 tokens_per_minute=8", "tokens_per_minute=9, 8; expected one number"),
        ("group=a group=b", "expected KEY group=NAME"),
        ("model=qwen # for Alice", "a key that another word follows; expected KEY"),
        ("# for Alice", "a key that a comment follows; remove the comment"),
        ("#alice model=qwen", "a key that a comment follows"),
    ],
)
def test_a_line_that_is_wrong_is_refused_without_its_key(words, message):
    """Otherwise a misspelt limit, or a comment, would be taken for a part of the key, or be ignored."""
    with pytest.raises(SettingsError) as refused:
        read_line(f"{KEY} {words}", "api_keys")
    assert message in str(refused.value) and KEY not in str(refused.value)


def test_a_key_may_have_spaces():
    assert read_line("two words", "x").limits == KeyLimits()
    assert read_line("with#inside", "x").limits == KeyLimits()


def test_an_admin_key_has_no_limits():
    with pytest.raises(SettingsError, match="an admin key may use everything"):
        KeyRing((f"{KEY} model=qwen",), None, "admin_keys", takes_limits=False)


def test_a_changed_limit_holds_at_once(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY} model=a")
    ring = KeyRing((), file, "api_keys")
    assert ring.restricts_models
    file.write_text(f"{KEY} model=abc")
    found = ring.find(KEY)
    assert found is not None and found.limits.models == ("abc",)
    assert ring.limits_of(found.tenant) == found.limits and ring.limits_of("0" * 16) is None


# --- rates ---------------------------------------------------------------------------------------------------------------------


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def use_of(clock: Clock, **limits: int) -> KeyUse:
    use = Rates(lambda: {"key"}, clock).of("key", KeyLimits(**limits))
    assert use is not None
    return use


def refused(use: KeyUse) -> ApiError:
    with pytest.raises(ApiError) as error:
        use.begin()
    assert error.value.kind.status == 429
    return error.value


def test_requests_fill_up_again_at_the_rate():
    clock = Clock()
    use = use_of(clock, requests_per_minute=30)
    for _ in range(30):
        use.begin()
    error = refused(use)
    assert "the key has used its 30 requests per minute; retry in 2 s" in error.message
    assert error.response_headers()["retry-after"] == "2"
    assert use.headers()["x-ratelimit-remaining-requests"] == "0" and use.headers()["x-ratelimit-reset-requests"] == "60.000s"
    clock.now_s += 2
    use.begin()
    refused(use)
    clock.now_s += 3600
    assert use.headers()["anthropic-ratelimit-requests-remaining"] == "30", "a bucket holds one minute's worth"


def test_tokens_are_counted_when_they_are_known():
    clock = Clock()
    use = use_of(clock, tokens_per_minute=600)
    use.begin()
    use.begin()  # runs at the same time
    use.charge(500)
    use.charge(400)
    assert "600 tokens per minute; retry in 31 s" in refused(use).message  # 300 below empty, and one to begin with
    clock.now_s += 31
    use.begin()
    assert use.headers()["x-ratelimit-remaining-tokens"] == "10"


def test_requests_at_once_are_counted_until_their_end():
    use = use_of(Clock(), concurrent_requests=2)
    use.begin()
    use.begin()
    assert "2 running requests" in refused(use).message
    use.end()
    use.begin()


def test_a_key_keeps_its_use_until_its_limits_change():
    rates = Rates(lambda: {"a", "b"}, Clock())
    assert rates.of("a", KeyLimits(("model",))) is None, "a key without rates takes no memory"
    first = rates.of("a", KeyLimits(requests_per_minute=1))
    assert rates.of("a", KeyLimits(requests_per_minute=1)) is first
    assert rates.of("b", KeyLimits(requests_per_minute=1)) is not first
    assert rates.of("a", KeyLimits(requests_per_minute=2)) is not first


def test_a_key_that_is_gone_takes_no_memory():
    """Keys are replaced again and again in a long life."""
    limits, known = KeyLimits(requests_per_minute=1), {"a", "b"}
    rates = Rates(lambda: known, Clock())
    first, kept = rates.of("a", limits), rates.of("b", limits)
    known ^= {"a", "c"}
    rates.of("c", limits)
    assert rates.of("b", limits) is kept
    known.add("a")
    assert rates.of("a", limits) is not first


def test_a_part_of_a_request_counts_as_a_request_and_runs_within_it():
    clock = Clock()
    use = use_of(clock, requests_per_minute=2, tokens_per_minute=60, concurrent_requests=1)
    use.begin()
    use.take()
    with pytest.raises(ApiError, match="2 requests per minute; retry in 30 s"):
        use.take()
    clock.now_s += 30
    use.charge(100)
    with pytest.raises(ApiError, match="60 tokens per minute"):
        use.take()
    clock.now_s += 60
    use.take()
    assert use.num_running == 1


def test_a_file_with_a_malformed_line_is_read_once(tmp_path, monkeypatch):
    """Otherwise a typing error in a long file would delay every request. It is read again when it changes."""
    file = tmp_path / "keys"
    file.write_text(KEY)
    ring = KeyRing((), file, "api_keys")
    file.write_text(f"{KEY}\nsecond-key-of-a-client modle=qwen")
    num_read, read = 0, keys.read_line

    def counted(line: str, where: str) -> keys.Known:
        nonlocal num_read
        num_read += 1
        return read(line, where)

    monkeypatch.setattr(keys, "read_line", counted)
    assert all(ring.find(KEY) for _ in range(5)) and num_read == 2
    file.write_text(f"{KEY}\nsecond-key-of-a-client model=qwen")
    os.utime(file, ns=(1, 1))
    assert ring.find("second-key-of-a-client")
