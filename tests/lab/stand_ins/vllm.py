"""A stand-in for vLLM in tests. It computes nothing: every answer has the same log-probabilities, and takes a millisecond per token. It
logs its calls to the file $STAND_IN_LOG, a line each."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace


def log(*words):
    with open(os.environ["STAND_IN_LOG"], "a") as file:
        print(*words, file=file)


class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings


class LLM:
    def __init__(self, model, **settings):
        if status := os.environ.get("STAND_IN_STATUS"):
            os._exit(int(status))
        print("vLLM prints much to its standard output")
        log("LLM", os.environ["CUDA_VISIBLE_DEVICES"], json.dumps(settings, sort_keys=True))

    def generate(self, prompts, params, use_tqdm):
        log("generate", len(prompts), len(prompts[0]["prompt_token_ids"]), json.dumps(params.settings, sort_keys=True))
        time.sleep(params.settings["max_tokens"] / 1000)
        answer = SimpleNamespace(logprobs=[{token: SimpleNamespace(logprob=-5.0) for token in range(20)}])
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]
