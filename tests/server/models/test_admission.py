from __future__ import annotations

import pytest

from server.errors import KEY_QUOTA, QUEUE_FULL, ApiError
from server.messages import Constraint, ConstraintKind
from server.models.admission import Admission


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr("server.models.admission.time.monotonic", lambda: Clock.now)
    return Clock


def test_what_is_taken_is_given_back_once():
    admission = Admission("m", max_running=2, max_queued=1, max_queued_tokens=100)
    lease = admission.admit(2, 30)
    assert (admission.num_sequences, admission.num_queued_tokens) == (2, 30)
    lease.prefilled()
    lease.prefilled()
    assert (admission.num_sequences, admission.num_queued_tokens) == (2, 0)
    lease.release()
    lease.release()
    assert (admission.num_sequences, admission.num_queued_tokens) == (0, 0)


def test_refusals():
    admission = Admission("m", max_running=2, max_queued=1, max_queued_tokens=100)
    admission.admit(1, 500)  # 500 tokens exceed the limit but are admitted, because no other request waits; later requests are refused
    for num_sequences, num_tokens in ((3, 1), (1, 1)):
        with pytest.raises(ApiError) as caught:
            admission.admit(num_sequences, num_tokens)
        assert caught.value.kind is QUEUE_FULL and caught.value.headers["x-ratelimit-remaining-requests"] == "2"
    assert admission.num_sequences == 1


def test_the_wait_follows_the_pace_of_a_full_model(clock):
    admission = Admission("m", max_running=1, max_queued=3, max_queued_tokens=10**9)
    leases = [admission.admit(1, 1) for _ in range(4)]
    for _ in range(60):  # one request ends every three seconds
        clock.now += 3
        leases.pop(0).release()
        leases.append(admission.admit(1, 1))
    with pytest.raises(ApiError) as caught:
        admission.admit(2, 1)
    assert float(caught.value.headers["retry-after-ms"]) == pytest.approx(2 * 3000, rel=0.05)
    assert caught.value.headers["retry-after"] == "6"
    reset = caught.value.headers["x-ratelimit-reset-requests"]
    assert float(reset.removesuffix("s")) == pytest.approx(3 * 3, rel=0.05)


def refused(admission: Admission) -> dict[str, str]:
    with pytest.raises(ApiError) as caught:
        admission.admit(1, 1)
    return caught.value.headers


def test_the_quiet_before_a_burst_says_nothing_of_the_pace(clock):
    admission = Admission("m", max_running=1, max_queued=3, max_queued_tokens=10**9)
    admission.admit(1, 1).release()
    clock.now += 3600
    leases = [admission.admit(1, 1) for _ in range(4)]
    clock.now += 2
    leases.pop(0).release()
    admission.admit(1, 1)
    assert float(refused(admission)["retry-after-ms"]) <= 2000


def test_a_model_without_a_queue_has_a_pace_too(clock):
    admission = Admission("m", max_running=2, max_queued=0, max_queued_tokens=10**9)
    leases = [admission.admit(1, 1) for _ in range(2)]
    for _ in range(60):
        clock.now += 20
        leases.pop(0).release()
        leases.append(admission.admit(1, 1))
    headers = refused(admission)
    assert float(headers["retry-after-ms"]) == pytest.approx(20_000, rel=0.05)
    assert float(headers["x-ratelimit-reset-requests"].removesuffix("s")) == pytest.approx(20, rel=0.05)


def test_a_key_leaves_places_for_others():
    """A key that waits may hold 7/8 of all places, and a key that holds none is admitted."""
    admission = Admission("m", max_running=2, max_queued=14, max_queued_tokens=1000)
    leases = [admission.admit(1, 1, "greedy") for _ in range(14)]
    with pytest.raises(ApiError, match="your key has 14 sequences at model 'm', and 2 of 16 places are free") as caught:
        admission.admit(1, 1, "greedy")
    assert caught.value.kind is KEY_QUOTA and int(caught.value.headers["retry-after"]) >= 1
    leases.append(admission.admit(1, 1, "modest"))
    for lease in leases:
        lease.release()
    assert not admission.held and admission.num_sequences == 0


def test_a_batch_that_is_not_full_knows_no_quota():
    admission = Admission("m", max_running=4, max_queued=0, max_queued_tokens=1000)
    for _ in range(4):
        admission.admit(1, 1, "only")


def test_constraints_of_a_key_are_counted_while_they_are_in_use():
    admission = Admission("m", max_running=8, max_queued=8, max_queued_tokens=1000, max_constraints=1)
    one, two = (Constraint(ConstraintKind.REGEX, source) for source in ("a", "b"))
    leases = [admission.admit(1, 1, "key", one) for _ in range(2)]
    with pytest.raises(ApiError, match="1 different constraints"):
        admission.admit(1, 1, "key", two)
    admission.admit(1, 1, "other", two)
    for lease in leases:
        lease.release()
        lease.release()
    admission.admit(1, 1, "key", two)
