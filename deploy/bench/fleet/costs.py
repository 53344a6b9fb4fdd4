"""The costs of a replica's steps, as measured on this machine, as read from a file, or as stored here for some machines."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import msgspec

from deploy.model_loading.costs import largest_step, sizes_of, step_of
from server.engine.scheduling.pace import extrapolated_s
from server.engine.step_model import StepLimits, StepModel

DECODING = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of decoding sequences whose steps are measured
NEAR, FAR = 128, 1024  # tokens of context in the two steps whose times give `context_s`
NUM_RUNS, ENOUGH_S = 9, 0.5  # largest number of runs of a step, and seconds after which no further run begins
# Fields that a file of costs must have, because a missing field would count as 0 -> what adds these seconds to a step.
ADDED = {"context_s": "a token of context of a decoding sequence", "pair_s": "a pair of a prompt token and a token of context"}


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs and the limits of a replica. A step that computes prompts and decodes costs as much as one step of each kind, less the
    smallest step, because it reads the weights only once."""

    prompt: Mapping[int, float]  # tokens of one prompt -> seconds of a step
    decode: Mapping[int, float]  # sequences that decode -> seconds of a step
    context_s: float = 0.0  # seconds that each token of a decoding sequence's context adds, beyond the first NEAR tokens
    pair_s: float = 0.0  # seconds that each pair of a prompt token and a token of context before its chunk adds
    max_tokens: int = 512  # largest number of tokens in a step
    max_seqs: int = 64  # largest number of sequences that run at the same time
    capacity: int = 65536  # tokens whose pages fit into memory
    token_bytes: int = 0  # bytes of pages per token

    def slower(self, factor: float) -> Costs:
        """Return costs of steps that take `factor` times as long."""
        prompt, decode = ({size: factor * seconds for size, seconds in costs.items()} for costs in (self.prompt, self.decode))
        return replace(self, prompt=prompt, decode=decode, context_s=factor * self.context_s, pair_s=factor * self.pair_s)

    def step_s(self, num_prompt: int, num_decode: int, num_context: int, num_pairs: int = 0) -> float:
        """Return the seconds of a step. `num_context` counts the tokens before all decoding sequences, `num_pairs` the pairs of a prompt
        token and a token of context before its chunk."""
        seconds = 0.0
        if num_decode:
            seconds = between(self.decode, num_decode) + self.context_s * max(0, num_context - NEAR * num_decode)
        if num_prompt:
            seconds += between(self.prompt, num_prompt) + self.pair_s * num_pairs
        if num_prompt and num_decode:
            seconds -= min(self.prompt[min(self.prompt)], self.decode[min(self.decode)])
        return seconds

    def prompt_s(self, num_tokens: int) -> float:
        """Return the seconds of a prompt that is computed alone, in steps of `max_tokens`."""
        num_steps, rest = divmod(num_tokens, self.max_tokens)
        num_pairs = self.max_tokens**2 * num_steps * (num_steps - 1) // 2 + num_steps * self.max_tokens * rest
        computing_s = num_steps * between(self.prompt, self.max_tokens) + (between(self.prompt, rest) if rest else 0.0)
        return computing_s + self.pair_s * num_pairs


CostsAt = Callable[[float], tuple[Costs, float]]  # the costs at a time, and the time until which they hold


def constant(costs: Costs) -> CostsAt:
    """Return costs that never change."""
    return lambda _: (costs, inf)


def between(costs: Mapping[int, float], size: int) -> float:
    """Return the seconds of a step of a size. Interpolate linearly between two measured sizes, and extrapolate beyond the largest. Smaller
    steps cost as much as the smallest. `costs` is sorted by size."""
    sizes = list(costs)
    at = bisect_right(sizes, size)
    if at == 0:
        return costs[sizes[0]]
    if at == len(sizes):
        return extrapolated_s(costs, size)
    less, more = sizes[at - 1], sizes[at]
    return costs[less] + (size - less) / (more - less) * (costs[more] - costs[less])


def measure(model: StepModel, clock: Callable[[], float] = time.perf_counter) -> Costs:
    """Measure the costs of a model's steps on this machine, and return them with the model's limits. `pair_s` is 0 if the context is too
    short to measure it."""
    limits, seconds = model.limits, partial(_seconds, model, clock)
    prompt = {size: seconds(1, size, size) for size in sizes_of(largest_step(limits))}
    counts = [count for count in DECODING if count <= limits.max_seqs]
    decode = {count: seconds(count, 1, NEAR) for count in counts}
    far, most = min(FAR, limits.max_context), min(8, counts[-1])
    context_s = max(0.0, seconds(most, 1, far) - decode[most]) / (most * max(1, far - NEAR))
    token_bytes = sum(group.page_bytes // group.page_size for group in limits.groups if group.window is None)
    # Compare the second half of a prompt with the first: only the second has context before it.
    size = max((size for size in prompt if 2 * size <= min(limits.max_context, _capacity(limits))), default=0)
    pair_s = max(0.0, seconds(1, size, 2 * size) - prompt[size]) / size**2 if size else 0.0
    return Costs(prompt, decode, context_s, pair_s, limits.max_tokens, limits.max_seqs, _capacity(limits), token_bytes)


def read(path: Path) -> Costs:
    """Read what `relaxserve bench fleet --measure` has printed. Raise ValueError if the file is something else, has impossible numbers, or
    was printed by a version that did not measure some of the costs, which would count as 0."""
    try:
        text = path.read_bytes()
        found, given = msgspec.json.decode(text, type=Costs), msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; expected what `relaxserve bench fleet --measure` prints") from error
    for name, what in ADDED.items():
        if name not in given:
            raise ValueError(f"{path}: {name} is missing; expected the seconds of {what}; measure the costs again")
    numbers = (
        *found.prompt,
        *found.prompt.values(),
        *found.decode,
        *found.decode.values(),
        found.max_tokens,
        found.max_seqs,
        found.capacity,
    )
    if not found.prompt or not found.decode or min(numbers) <= 0 or min(found.context_s, found.pair_s, found.token_bytes) < 0:
        raise ValueError(f"{path}: expected costs of prompts and of decoding, and limits, all above 0; measure them again")
    if found.max_seqs > found.max_tokens:
        raise ValueError(f"{path}: max_seqs is {found.max_seqs}; expected at most max_tokens, {found.max_tokens}")
    return replace(found, prompt=dict(sorted(found.prompt.items())), decode=dict(sorted(found.decode.items())))


def _capacity(limits: StepLimits) -> int:
    """Return the number of tokens whose pages fit into memory in each cache group without a window."""
    return min(group.num_pages * group.page_size for group in limits.groups if group.window is None)


def _seconds(model: StepModel, clock: Callable[[], float], num_seqs: int, num_each: int, context: int) -> float:
    """Run a step several times and return its median time. The shortest time would be too short for a machine that also does other
    work."""
    batch, took_s = step_of(model.limits, num_seqs=num_seqs, num_each=num_each, context=context), list[float]()
    while len(took_s) < NUM_RUNS and sum(took_s) < ENOUGH_S:
        began_s = clock()
        model.download(model.run(batch))
        took_s.append(clock() - began_s)
    return sorted(took_s)[len(took_s) // 2]


# --- machines that were measured before ---------------------------------------------------------------------------------

# What `relaxserve bench fleet --measure --model smollm2.gguf` printed with RELAXSERVE_THREADS=1 on one of two cores of a server CPU with
# AVX-512, while the other core ran the same command.
SMOLLM2 = Costs(
    prompt={1: 0.00457, 4: 0.00581, 16: 0.0190, 64: 0.0712, 256: 0.253, 512: 0.573},
    decode={1: 0.00513, 2: 0.00519, 4: 0.00686, 8: 0.0119, 16: 0.0231, 32: 0.0440, 64: 0.0869},
    context_s=1.26e-6,
    pair_s=8.8e-7,
    max_tokens=512,
    max_seqs=64,
    capacity=2912 * 16,
    token_bytes=23040,
)

MACHINES: Mapping[str, Costs] = {"smollm2-core": SMOLLM2}
