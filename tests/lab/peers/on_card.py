"""Measure a peer on a GPU. `tests/lab/card_peer.py` starts this module with the interpreter that has the peer's packages, so only NumPy
and the peer itself are imported.

    python -m tests.lab.peers.on_card KIND FOLDER CONTEXT SEQUENCES

FOLDER is a checkpoint in bfloat16. CONTEXT and SEQUENCES are the largest of all steps. Each line of the input is a step as JSON; each line
of the output is its answer, with the seconds of the fastest run, or with an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from tests.lab.peers.torch_llama import TorchLlama, tensor_of

GPU = "cuda"
WARM = 3  # runs before the measured ones, in which kernels are compiled and graphs captured
DECODED = 32  # tokens by which two answers of vLLM differ, from whose times the time of a step is computed
TOP = 20  # the most log-probabilities that vLLM returns per token


class Engine(Protocol):
    def measure(self, tokens: int, sequences: int, context: int, rounds: int, *, logits: bool) -> dict[str, Any]:
        """Return a step's time as `seconds`. With `logits`, also return the logits after each sequence's last token as `logits`, or the
        highest log-probabilities there as `logprobs`."""
        ...


class Torch:
    def __init__(self, folder: Path, *, is_compiled: bool) -> None:
        self._torch = torch = import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU; install a build of torch for CUDA")
        self._llama = TorchLlama(torch, config_of(folder), weights_of(torch, folder), GPU, is_compiled=is_compiled)

    def measure(self, tokens: int, sequences: int, context: int, rounds: int, *, logits: bool) -> dict[str, Any]:
        torch, run = self._torch, self._llama.step(tokens, sequences, context)
        found = run()
        for _ in range(WARM - 1):
            run()
        times: list[float] = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        answer: dict[str, Any] = {"seconds": min(times)}
        return {**answer, "logits": found.float().cpu().numpy().tolist()} if logits else answer


class Vllm:
    """vLLM runs no single steps, so the time of a decoding step is computed from two answers that differ by DECODED tokens."""

    def __init__(self, folder: Path, context: int, sequences: int) -> None:
        self._vllm = import_module("vllm")
        self._vocab_size = config_of(folder).vocab_size
        settings = {"dtype": "bfloat16", "max_model_len": context + DECODED + 1, "max_num_seqs": sequences}
        self._llm = self._vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, enable_prefix_caching=False, gpu_memory_utilization=0.8, **settings
        )

    def measure(self, tokens: int, sequences: int, context: int, rounds: int, *, logits: bool) -> dict[str, Any]:
        is_prefill = tokens > sequences
        length = context if is_prefill else max(1, context - DECODED // 2)  # a decoding step has `context` tokens on average
        prompts = [{"prompt_token_ids": [token % self._vocab_size for token in range(length)]} for _ in range(sequences)]
        self._seconds(prompts, 1 + DECODED)
        times: list[float] = []
        for _ in range(rounds):
            first = self._seconds(prompts, 1)
            times.append(first if is_prefill else (self._seconds(prompts, 1 + DECODED) - first) / DECODED)
        answer: dict[str, Any] = {"seconds": min(times)}
        return {**answer, "logprobs": self._logprobs(prompts)} if logits else answer

    def _seconds(self, prompts: list[dict[str, Any]], num_tokens: int) -> float:
        started = time.perf_counter()
        self._generate(prompts, max_tokens=num_tokens)
        return time.perf_counter() - started

    def _logprobs(self, prompts: list[dict[str, Any]]) -> list[dict[int, float]]:
        outputs = self._generate(prompts, max_tokens=1, logprobs=TOP)
        return [{int(token): float(found.logprob) for token, found in output.outputs[0].logprobs[0].items()} for output in outputs]

    def _generate(self, prompts: list[dict[str, Any]], **settings: Any) -> Any:
        params = self._vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **settings)
        return self._llm.generate(prompts, params, use_tqdm=False)


ENGINES: Mapping[str, Callable[[Path, int, int], Engine]] = {
    "torch eager": lambda folder, _context, _sequences: Torch(folder, is_compiled=False),
    "torch compiled": lambda folder, _context, _sequences: Torch(folder, is_compiled=True),
    "vllm": Vllm,
}


def config_of(folder: Path) -> Any:
    c = json.loads((folder / "config.json").read_text())
    return SimpleNamespace(
        vocab_size=c["vocab_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        norm_eps=c["rms_norm_eps"],
        rope=SimpleNamespace(theta=c["rope_theta"]),
    )


def weights_of(torch: Any, folder: Path) -> dict[str, Any]:
    """Read the tensors of a safetensors file one by one, because the peer's interpreter may lack the package."""
    data = np.memmap(folder / "model.safetensors", np.uint8, "r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    found: dict[str, Any] = {}
    for name, about in json.loads(data[8:begin].tobytes()).items():
        if name != "__metadata__":
            low, high = about["data_offsets"]
            bits = data[begin + low : begin + high].view(np.int16).reshape(about["shape"])
            found[name] = tensor_of(torch, bits, GPU)
    return found


def main(kind: str, folder: str, context: str, sequences: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peer prints must not mix with the answers
    engine: Engine | None = None
    for line in sys.stdin:
        try:
            engine = engine or ENGINES[kind](Path(folder), int(context), int(sequences))
            answer = engine.measure(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
