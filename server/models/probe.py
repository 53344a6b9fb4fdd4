"""Probe a model: send a short request to its worker, and check the answer."""

from __future__ import annotations

import math
import secrets
import struct
import time
from contextlib import aclosing
from dataclasses import dataclass

from runtime.spectrogram import AROUND, HOP
from server.errors import PROBE_FAILED, ApiError
from server.interfaces import RequestError
from server.messages import Audio, Embed, SamplingParams, Submit
from server.models.model import Loaded


@dataclass(frozen=True, slots=True)
class Probe:
    """A short request, and what its answer must be."""

    prompt: str = "Hello"
    expect: str = ""  # text that the answer must contain
    max_tokens: int = 8
    timeout_s: float = 30.0


PLAIN = Probe()


async def require_answer(name: str, loaded: Loaded, probe: Probe) -> None:
    """Raise PROBE_FAILED unless the model answers `probe` as expected. A model that transcribes gets silence with the prompt. A model that
    only embeds or classifies must give a finite vector; `probe.expect` does not matter then."""
    try:
        if loaded.ready.generates or loaded.ready.num_hops:
            await _require_text(name, loaded, probe)
        else:
            await _require_vector(name, loaded, probe)
    except RequestError as error:
        raise _failed(name, error.message) from error


async def _require_text(name: str, loaded: Loaded, probe: Probe) -> None:
    """Raise PROBE_FAILED unless the model's answer ends in time and contains the expected text."""
    params = SamplingParams(max_tokens=probe.max_tokens, temperature=0.0)
    prompt_ids = tuple(loaded.tokenizer.encode(probe.prompt, True))
    deadline = time.monotonic() + probe.timeout_s
    silence = Audio(bytes(4 * (HOP + AROUND)), 0.0) if loaded.ready.num_hops else None
    submit = Submit(f"probe-{secrets.token_hex(8)}", prompt_ids, params, deadline=deadline, audio=silence)
    answer: list[int] = []
    ended = False
    async with aclosing(loaded.worker.generate(submit)) as events:
        async for event in events:
            answer += event.token_ids
            ended = ended or event.finish_reason in ("stop", "length")
    text = loaded.tokenizer.decode(answer)
    if not ended:
        raise _failed(name, f"its answer did not end within {probe.timeout_s:g} s")
    if probe.expect not in text:
        raise _failed(name, f"its answer to {probe.prompt!r:.80} is {text!r:.200}; expected an answer that contains {probe.expect!r:.80}")


async def _require_vector(name: str, loaded: Loaded, probe: Probe) -> None:
    """Raise PROBE_FAILED unless the model gives a finite vector."""
    prompt_ids = tuple(loaded.tokenizer.encode(probe.prompt, True))
    deadline = time.monotonic() + probe.timeout_s
    embedding = await loaded.worker.embed(Embed(f"probe-{secrets.token_hex(8)}", prompt_ids, deadline=deadline))
    values = struct.unpack(f"<{len(embedding.vector) // 4}f", embedding.vector)
    if not values or not all(map(math.isfinite, values)):
        raise _failed(name, "its embedding is not finite")


def _failed(name: str, why: str) -> ApiError:
    """Return the error for a probe that failed."""
    return ApiError(PROBE_FAILED, f"model {name!r} failed its probe, so it takes no alias and replaces no model: {why}", param="model")
