"""Traces: the requests that a simulated fleet gets, with their times of arrival and the beginnings that their prompts share.

A prompt is a number of tokens and the keys of its beginnings, one for each BLOCK_TOKENS tokens, as the router's key chains
(`deploy/ray/wish.py`). Prompts with a common beginning have common first keys.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from deploy.ray.wish import KEY_BYTES

BLOCK_TOKENS = 64  # tokens of a block, about as many as a block of the router's key chain has at four characters a token


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    at_s: float  # time of arrival in seconds since the beginning of the trace
    session: int  # number of its session
    num_prompt: int  # tokens of the prompt
    num_new: int  # tokens of the answer
    keys: tuple[bytes, ...]  # keys of the prompt's beginnings, the shortest first
    keys_after: tuple[bytes, ...] = ()  # keys of the prompt with its answer, if a later prompt begins with both


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of a trace: the rate of its requests, its duration, the mean lengths of prompts and answers, and the seed."""

    rate: float  # requests per second, on average over the trace
    duration_s: float
    num_prompt: int = 512  # tokens of a prompt, on average; in `sessions`, of the text that each request adds
    num_new: int = 128  # tokens of an answer, on average
    seed: int = 0

    @property
    def num_requests(self) -> int:
        """The rate times the duration: about how many requests the trace has."""
        return int(self.rate * self.duration_s)


def key_of(before: bytes, name: str) -> bytes:
    """Return the key of the block `name` that follows the block with the key `before`."""
    return blake2b(before + name.encode(), digest_size=KEY_BYTES).digest()


def extended(keys: tuple[bytes, ...], name: str, num_tokens: int) -> tuple[bytes, ...]:
    """Return the keys of a prompt of `num_tokens` tokens. The prompt begins with the blocks that have `keys`, and goes on with a text of
    its own, called `name`. Only whole blocks have keys."""
    found = list(keys[: num_tokens // BLOCK_TOKENS])
    while len(found) < num_tokens // BLOCK_TOKENS:
        found.append(key_of(found[-1] if found else b"", f"{name} {len(found)}"))
    return tuple(found)


def _length(rng: random.Random, mean: int) -> int:
    """Draw a number of tokens. Lengths of prompts and answers are skewed: half of them are below 0.8 times the mean."""
    return max(1, round(rng.lognormvariate(math.log(mean) - 0.25, 0.7071)))


def _arrivals(shape: Shape, rng: random.Random, share: Callable[[float], float], most: float) -> Iterator[float]:
    """Yield random times whose rate at time t is `shape.rate * share(t)`, at most `shape.rate * most`."""
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(shape.rate * most)) < shape.duration_s:
        if rng.random() * most < share(at_s):
            yield at_s


def _alone(shape: Shape, share: Callable[[float], float], most: float) -> list[Arrival]:
    """Return requests whose prompts have no common beginnings, each in a session of its own. Their rate at time t is `shape.rate *
    share(t)`, at most `shape.rate * most`."""
    rng = random.Random(shape.seed)
    found: list[Arrival] = []
    for number, at_s in enumerate(_arrivals(shape, rng, share, most)):
        num_prompt = _length(rng, shape.num_prompt)
        found.append(
            Arrival(at_s, number, num_prompt, _length(rng, shape.num_new), extended((), f"alone {shape.seed} {number}", num_prompt))
        )
    return found


def poisson(shape: Shape) -> list[Arrival]:
    """Requests that arrive independently of each other, and whose prompts have no common beginnings."""
    return _alone(shape, lambda _: 1.0, 1.0)


def bursts(shape: Shape) -> list[Arrival]:
    """As `poisson`, but the first ten seconds of each minute have five times the rate of the other seconds."""
    quiet = 60 / (50 + 10 * 5)
    return _alone(shape, lambda at_s: quiet * (5 if at_s % 60 < 10 else 1), 5 * quiet)


def day(shape: Shape) -> list[Arrival]:
    """As `poisson`, with a rate that follows a day, which lasts as long as the trace: 0.4 of the average at night, 1.6 at noon."""
    return _alone(shape, lambda at_s: 1 - 0.6 * math.cos(2 * math.pi * at_s / shape.duration_s), 1.6)


def sessions(shape: Shape) -> list[Arrival]:
    """Agents: sessions of about twelve requests, where each prompt begins with the previous prompt and its answer. There are four kinds of
    sessions. All sessions of a kind begin with the same instructions, which are four times as long as the text that a request adds on
    average. Requests after the end of the trace are left out."""
    rng = random.Random(shape.seed)
    num_turns, found = 12, list[Arrival]()
    starts = Shape(shape.rate / num_turns, shape.duration_s)
    for number, start_s in enumerate(_arrivals(starts, rng, lambda _: 1.0, 1.0)):
        kind, at_s = number % 4, start_s
        num_prompt = 4 * shape.num_prompt
        keys = extended((), f"instructions {kind}", num_prompt)
        for _ in range(1 + int(rng.expovariate(1 / (num_turns - 1)))):
            num_prompt += _length(rng, shape.num_prompt)
            num_new = _length(rng, shape.num_new)
            keys = extended(keys, f"session {shape.seed} {number}", num_prompt)
            after = extended(keys, f"session {shape.seed} {number}", num_prompt + num_new)
            found.append(Arrival(at_s, number, num_prompt, num_new, keys, after))
            keys, num_prompt = after, num_prompt + num_new
            at_s += rng.expovariate(1 / 15.0)  # meanwhile, a tool of the agent runs, or a person reads the answer
    return sorted((one for one in found if one.at_s < shape.duration_s), key=lambda one: one.at_s)


TRACES: Mapping[str, Callable[[Shape], list[Arrival]]] = {"poisson": poisson, "bursts": bursts, "sessions": sessions, "day": day}
