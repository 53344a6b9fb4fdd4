"""Measure the speed of a model in one format of weights as its users will see it: the tokens per second that one client of a server on this
machine gets.

The measured requests take the same path as those of users: HTTP, the front, its socket to the worker, the engine, the detokenizer, the
events of the stream. Client, front and worker are separate processes, which share the cores of this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deploy.client import Client, segment
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.known import Progress, begin, refusals, silent
from deploy.model_loading.stages import advance
from deploy.quality.measure import label_for, measurable, text_windows
from deploy.served import served
from deploy.streams import OverHttp, Prompt, Stream
from server.interfaces import LoadError
from server.load_settings import LoadSettings
from server.messages import ErrorCode, Load, QualityLabel
from server.models.processes import usage_of
from server.models.state import ModelSpec
from server.settling import REST_S

NAME = "measured"
NUM_BEFORE, NUM_DECODED = 128, 128  # tokens of each request's prompt, and most tokens that it generates
NUM_FIRST, LEAST_DECODED = 16, 8  # tokens that the first request generates, and least tokens that each later one generates
ROUNDS, ROUND_S = 5, 1.5  # number of measured requests, and most seconds of one that generates more than LEAST_DECODED tokens
SETTLED_S = REST_S + 0.5  # seconds without requests after which a model has begun to settle its memory (`Device.settle`)
# A server has settled when all its processes together use at most the share QUIET of one core during LOOK_S seconds. The measurement waits
# for this for at most MOST_S seconds.
LOOK_S, QUIET, MOST_S = 0.25, 0.1, 30.0


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a form for one client of a server without other requests."""

    tokens_per_s: float  # after the first token; the median of several requests
    num_before: int  # tokens of a request's prompt
    num_decoded: int  # tokens that a request generates after its prompt


@dataclass(frozen=True, slots=True)
class Quality:
    """The label and the speed of a form."""

    label: QualityLabel
    speed: Speed


@refusals()
def quality_of(load: Load, progress: Progress = silent) -> Quality:
    """Return the label of a form, measured now or before, and its speed, measured now. Raise LoadError if either cannot be measured."""
    advance(begin(load, progress), Compiled)  # compiles the program of the server, which the label uses, too
    known = measurable(load, progress)
    label = label_for(known, load)  # before the server takes memory
    settings: dict[str, Any] = {name: getattr(load, name) for name in LoadSettings.__struct_fields__}
    settings |= {"name": NAME, "source": str(known.files.path), "label": False}
    progress("start a server", 0.0)
    with served(ModelSpec(**settings), log_level="error") as url:
        return Quality(label, speed_at(url, NAME, text_windows(known)[0], progress))


def speed_at(url: str, name: str, tokens: Sequence[int], progress: Progress = silent) -> Speed:
    """Measure the speed of a model of a server that has no other requests: wait until the server is at rest, and then run several requests.
    `tokens` are a text, whose beginning is the prompt. Raise LoadError if a request fails, or if its tokens have no text."""
    driver, max_context = OverHttp(url, name, temperature=0.0), Client(url).get(f"/v1/models/{segment(name)}")["max_model_len"]
    num_before = min(NUM_BEFORE, max_context // 2)
    most, prompt = min(NUM_DECODED, max_context - num_before), tuple(tokens[:num_before])

    def run(num_new: int) -> Stream:
        """Run a request for this many tokens. Raise LoadError if it fails, or if fewer than two pieces of text arrive."""
        try:
            (stream,) = driver.run([Prompt(prompt, num_new)])
        except (RuntimeError, OSError) as error:
            raise LoadError(ErrorCode.LOAD_FAILED, f"the speed cannot be measured: {error}") from error
        if len(stream.times_s) < 2:
            text = f"the speed cannot be measured: {num_new} tokens that follow a text have no text themselves; the model may be damaged"
            raise LoadError(ErrorCode.INVALID_VALUE, text)
        return stream

    first = run(min(most, NUM_FIRST))  # touches memory for the first time
    time.sleep(SETTLED_S)
    wait_for_rest()
    num_decoded = min(most, max(LEAST_DECODED, round(first.decoding_rate * ROUND_S)))
    rates: list[float] = []
    for number in range(ROUNDS):
        rates.append(run(num_decoded).decoding_rate)
        progress("measure the speed", (number + 1) / ROUNDS)
    return Speed(median(rates), num_before, num_decoded)


def wait_for_rest() -> None:
    """Wait until the processes below this one have done what a start leaves for later, such as to load a large vocabulary for constraints,
    which takes a core for seconds. If the system does not list a process's children, only this process counts, and the wait is short."""
    used_s = usage_of(os.getpid()).cpu_s
    for _ in range(round(MOST_S / LOOK_S)):
        time.sleep(LOOK_S)
        before_s, used_s = used_s, usage_of(os.getpid()).cpu_s
        if used_s - before_s <= QUIET * LOOK_S:
            break
