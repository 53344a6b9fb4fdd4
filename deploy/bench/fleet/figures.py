"""The figures of a simulated fleet: what clients see, what prefix caches save, and what a million tokens cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.bench.fleet.replica import Job
from deploy.bench.fleet.simulate import Outcome
from deploy.bench.measure import Figure
from deploy.bench.serving.drive import percentile


@dataclass(frozen=True, slots=True)
class Objective:
    """The longest time to the first token, and per token after it, with which an answer still satisfies its client."""

    first_s: float = 1.0
    token_s: float = 0.1  # per token after the first, on average over an answer

    def is_met(self, job: Job) -> bool:
        """Return whether a request has an answer that satisfies its client."""
        return first_s(job) <= self.first_s and token_s(job) <= self.token_s


def first_s(job: Job) -> float:
    """Return the time from a request's arrival to its first token, infinite if the request has got no token."""
    return float("inf") if job.first_s is None else job.first_s - job.arrival.at_s


def token_s(job: Job) -> float:
    """Return the time per token after the first, infinite if the request has not ended, and 0 if its answer has one token."""
    if job.end_s is None or job.first_s is None:
        return float("inf")
    return (job.end_s - job.first_s) / max(1, job.arrival.num_new - 1)


def figures_of(outcome: Outcome, objective: Objective, price: float) -> list[Figure]:
    """Return the figures of a simulated fleet. Times are those of requests that have ended. A refused request does not meet the objective.
    `price` is the cost of one replica for an hour."""
    ended = [job for job in outcome.jobs if job.end_s is not None]
    num_all = len(outcome.jobs) + outcome.num_refused
    first, token = [first_s(job) for job in ended], [token_s(job) for job in ended]
    num_new = sum(job.arrival.num_new for job in ended)
    num_prompt = sum(job.arrival.num_prompt for job in ended)
    met = sum(objective.is_met(job) for job in ended)
    return [
        Figure("requests", num_all, "", note=f"{outcome.num_refused} refused, {outcome.num_again} sent again"),
        Figure("requests without an answer", len(outcome.jobs) - len(ended), "", 0.0),
        Figure("tokens", num_new / outcome.wall_s if outcome.wall_s else 0.0, "tokens/s"),
        Figure("first token, median", _ms(first, 0.5), "ms"),
        Figure("first token, p99", _ms(first, 0.99), "ms"),
        Figure("token, median", _ms(token, 0.5), "ms"),
        Figure("token, p99", _ms(token, 0.99), "ms"),
        Figure("objective met", met / num_all if num_all else 1.0, "of requests", note=_text(objective)),
        Figure("prefix hits", sum(job.num_cached for job in ended) / num_prompt if num_prompt else 0.0, "of prompt tokens"),
        Figure("busy", outcome.busy_s / outcome.paid_s if outcome.paid_s else 0.0, "of the time"),
        Figure("replicas", outcome.paid_s / outcome.wall_s if outcome.wall_s else 0.0, "on average"),
        Figure(
            "cost",
            outcome.paid_s / 3600 * price / num_new * 1e6 if num_new else 0.0,
            "per million tokens",
            note=f"{price:g} per replica and hour",
        ),
    ]


def _text(objective: Objective) -> str:
    return f"first token within {objective.first_s:g} s, {objective.token_s * 1e3:g} ms per token"


def _ms(values: Sequence[float], share: float) -> float:
    """Return a percentile of seconds in milliseconds, or 0 if there are no values."""
    return percentile(values, share) * 1e3 if values else 0.0
