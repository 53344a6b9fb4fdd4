"""The peers on GPUs, for `python -m tests.lab model --device cuda` and for a day with a card. Each runs in a process of its own, by an
interpreter that the user names, so that relaxserve's environment needs none of their packages."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from runtime.device.registry import number_of
from server.settings import SettingsError

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.lab.peers.on_card"
FORMAT = "bf16"  # the format of weights in which all peers run
FAMILY = "llama"
ROUNDS = 20

Step = tuple[int, int, int]  # new tokens, sequences, context


@dataclass(frozen=True, slots=True)
class Package:
    module: str
    kinds: tuple[str, ...]  # the variants of the peer that are measured, as tests/lab/peers/on_card.py names them


CARD_PEERS = {"torch": Package("torch", ("torch eager", "torch compiled")), "vllm": Package("vllm", ("vllm",))}

_FIND = """
import importlib.metadata, importlib.util, sys
print(importlib.metadata.version(sys.argv[1]) if importlib.util.find_spec(sys.argv[1]) else "")
"""


def check(name: str, held: str, config: ModelConfig, python: str) -> str:
    """Return the version of the peer. Raise SettingsError if the interpreter does not have the peer, or if the peer cannot run this
    model."""
    if name not in CARD_PEERS:
        raise SettingsError(f"peer {name!r} does not run on GPUs; the peers on GPUs are {', '.join(CARD_PEERS)}")
    if held != FORMAT:
        raise SettingsError(f"peer {name!r} supports the weight format {FORMAT} on GPUs, not {held}")
    if name == "torch" and config.family != FAMILY:
        raise SettingsError(f"peer {name!r} runs shapes of the family {FAMILY}, not {config.family}")
    module = CARD_PEERS[name].module
    try:
        done = subprocess.run([python, "-c", _FIND, module], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"peer {name!r} needs an interpreter, and {python} cannot be run ({error}); see --peer-python") from error
    if done.returncode or not (version := done.stdout.strip()):
        remedy = f"install it with: {python} -m pip install {module}, or name the interpreter that has it with --peer-python"
        raise SettingsError(f"peer {name!r} is not installed for {python}; {remedy}")
    return version


class Process:
    """A peer at work in its process."""

    def __init__(self, kind: str, process: subprocess.Popen[str]) -> None:
        self._kind, self._process = kind, process

    def seconds(self, step: Step, *, rounds: int = ROUNDS) -> float:
        return self._ask(step, rounds, logits=False)["seconds"]

    def difference(self, step: Step, logits: NDArray[Any]) -> float:
        """Return the difference of the peer's logits from ours, relative to the norm of ours. A peer that returns only its highest
        log-probabilities is compared in these."""
        answer = self._ask(step, 1, logits=True)
        if "logits" in answer:
            ours, theirs = logits.astype(np.float64), np.array(answer["logits"])
        else:
            wide = logits.astype(np.float64)
            own = wide - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) - wide.max(1, keepdims=True)
            pairs = [(own[row, int(token)], p) for row, found in enumerate(answer["logprobs"]) for token, p in found.items()]
            ours, theirs = np.array(pairs).T
        return float(np.linalg.norm(theirs - ours) / np.linalg.norm(ours))

    def _ask(self, step: Step, rounds: int, *, logits: bool) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        tokens, sequences, context = step
        request = {"tokens": tokens, "sequences": sequences, "context": context, "rounds": rounds, "logits": logits}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SettingsError(f"the process of {self._kind} ended with status {self._process.wait()}; its output is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SettingsError(f"{self._kind} failed: {answer['error']}")
        return answer


@contextmanager
def at_work(kind: str, folder: Path, steps: Sequence[Step], device: str, python: str) -> Generator[Process]:
    """Start a peer on the GPU with the checkpoint of a folder."""
    sizes = [str(max(context for _, _, context in steps)), str(max(sequences for _, sequences, _ in steps))]
    command = [python, "-m", MODULE, kind, str(folder), *sizes]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible(device, os.environ)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Process(kind, process)
        finally:
            process.kill()


def visible(device: str, environment: Mapping[str, str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which the peer sees only our GPU. If this variable is already set, the number of
    `device` counts the GPUs that the variable lists."""
    listed = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    number = number_of(device)
    return listed[number] if number < len(listed) else str(number)
