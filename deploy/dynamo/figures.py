"""Read from the metrics of a server how large the cache of its model is, and how much of it is in use."""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE = re.compile(r'^(vllm:\w+)\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} (\S+)$', re.MULTILINE)  # name of a metric, its labels, its value
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')  # name and value of a label


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one model's cache. Dynamo calls pages blocks."""

    block_size: int = 0  # tokens of a block; 0: the model is not ready
    num_blocks: int = 0
    usage: float = 0.0  # share of the blocks that running requests hold
    num_looked_up: float = 0.0  # prompt tokens since the start of the server
    num_found: float = 0.0  # those of them that were in the prefix cache

    @property
    def num_used(self) -> int:
        """The number of blocks that running requests hold."""
        return round(self.usage * self.num_blocks)

    @property
    def hit_rate(self) -> float | None:
        """The share of the prompt tokens that were in the prefix cache; None: there was no prompt yet."""
        return self.num_found / self.num_looked_up if self.num_looked_up else None


def figures_in(page: str, model: str) -> Figures:
    """Read the figures of a model from `page`, the text of /metrics. Figures that the text lacks are 0. Raise ValueError or KeyError if a
    line of the model lacks a number."""
    values: dict[str, float] = {}
    block_size = num_blocks = 0
    for name, labels, value in LINE.findall(page):
        found = {key: re.sub(r'\\(["\\])', r"\1", text) for key, text in LABEL.findall(labels)}
        if found.get("model_name") != model:
            continue
        if name == "vllm:cache_config_info":
            block_size, num_blocks = int(found["block_size"]), int(found["num_gpu_blocks"])
        else:
            values[name] = float(value)
    return Figures(
        block_size,
        num_blocks,
        values.get("vllm:kv_cache_usage_perc", 0.0),
        values.get("vllm:prefix_cache_queries_total", 0.0),
        values.get("vllm:prefix_cache_hits_total", 0.0),
    )
