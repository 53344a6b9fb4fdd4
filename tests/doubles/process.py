"""A worker process whose model computes nothing: `python -m tests.doubles.process FD`. Everything else in the process is real: the
engine, the scheduler, the page pool and the recovery. Tests and benchmarks use it where kernels do not matter.

`Load.source` is a JSON object with the fields of `NullConfig`; `null_source` writes one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.cache_groups import PAGE_SIZE
from server.engine.step_model import EmbedLimits, GroupLimits, StepLimits
from server.engine.worker import LoadedModel, ProgressFn, serve_worker
from server.interfaces import LoadError
from server.messages import CachePages, ErrorCode, Load, Ready
from server.stages.relay import Relay
from tests.doubles.model import LogitsOf, NullEmbedModel, NullModel, StepTime, hashed_logits, null_page_bytes, scripted_logits


class NullConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vocab_size: int = 512
    max_context: int = 2048
    max_tokens: int = 512
    max_seqs: int = 64
    num_pages: int = 1024
    eos_ids: tuple[int, ...] = ()
    script: tuple[int, ...] = ()  # tokens that answer every prompt; if empty, logits depend on a hash of the prompt
    tokenizer: str = ""  # path of a tokenizer.json, for constraints; "" if there is none
    embedding_size: int = 0  # 0 for a model that does not embed
    kind: Literal["generator", "embedder", "encoder"] = "generator"
    step_s: float = 0.0
    token_s: float = 0.0
    load_s: float = 0.0
    overlap: bool = True
    deadly_token: int | None = None  # if a step reads this token, the process exits
    refused_from: str = ""  # path of a file that the first load creates; later loads are refused. "" refuses no load
    damaged_when: str = ""  # path of a file; once it exists, the process removes it and reports that the served files are damaged
    renamed_when: str = ""  # path of a file; once it exists, a load has another fingerprint
    stages_work: bool | None = None  # while a step runs, other stages of the model report that they compute (True), or do not (False)
    required_bytes: int = 0  # if above 0, the load is refused with INSUFFICIENT_MEMORY, as a model that requires this much memory


class NullRelay(Relay):
    """A relay to stages that report their CPU time and get no steps."""

    def __init__(self, *, uses_cpu: bool) -> None:
        super().__init__([])
        threading.Thread(target=self._report, args=(uses_cpu,), daemon=True).start()

    def _report(self, uses_cpu: bool) -> None:
        cpu_s = 5.0
        while True:
            time.sleep(0.05)
            cpu_s += 0.05 * uses_cpu
            self.on_working(cpu_s)


def null_source(config: NullConfig) -> str:
    return msgspec.json.encode(config).decode()


def build_null(load: Load, progress: ProgressFn) -> LoadedModel:
    config = msgspec.json.decode(load.source, type=NullConfig)
    progress("compile", 0.0)
    time.sleep(config.load_s)
    progress("compile", 1.0)
    if config.required_bytes:
        raise LoadError(ErrorCode.INSUFFICIENT_MEMORY, "the null model is configured not to fit into the memory", config.required_bytes, 0)
    if config.refused_from:
        _refuse_second(Path(config.refused_from))
    cost = StepTime(config.step_s, config.token_s)
    ready = Ready(
        signature="null",
        fingerprint="fp_other" if config.renamed_when and Path(config.renamed_when).exists() else "fp_null",
        cache_hit=True,
        max_context=config.max_context,
        num_pages=config.num_pages,
        page_size=PAGE_SIZE,
        weights_bytes=0,
        arena_bytes=0,
        kv_cache_bytes=config.num_pages * null_page_bytes(PAGE_SIZE),
        cache_groups=(CachePages(config.num_pages, null_page_bytes(PAGE_SIZE), PAGE_SIZE),),
        embedding_size=config.embedding_size,
        generates=config.kind == "generator",
    )
    if config.kind == "encoder":
        limits = EmbedLimits(config.vocab_size, config.embedding_size, config.max_context, config.max_context, config.max_seqs)
        return LoadedModel(ready, embed_model=NullEmbedModel(limits, cost=cost))
    sizes = (
        config.vocab_size,
        config.max_context,
        config.max_tokens,
        config.max_seqs,
        (GroupLimits(config.num_pages, page_bytes=null_page_bytes(PAGE_SIZE)),),
    )
    limits = StepLimits(*sizes, embedding_size=config.embedding_size, generates=ready.generates)
    return LoadedModel(
        ready,
        step_model=NullModel(limits, logits_of=_logits_of(config), cost=cost),
        eos_ids=config.eos_ids,
        read_tokenizer=Path(config.tokenizer).read_bytes if config.tokenizer else None,
        overlap=config.overlap,
        relay=None if config.stages_work is None else NullRelay(uses_cpu=config.stages_work),
        damage=partial(_damage, Path(config.damaged_when)) if config.damaged_when else None,
    )


def _logits_of(config: NullConfig) -> LogitsOf:
    inner = scripted_logits(config.vocab_size, config.script) if config.script else hashed_logits(config.vocab_size)

    def logits_of(history: NDArray[np.int32]) -> NDArray[np.float32]:
        if config.deadly_token is not None and config.deadly_token in history:
            os._exit(70)
        return inner(history)

    return logits_of


def _damage(mark: Path) -> str:
    while not mark.exists():
        time.sleep(0.005)
    mark.unlink()
    return "the null model is configured to report damage"


def _refuse_second(mark: Path) -> None:
    if mark.exists():
        raise LoadError(ErrorCode.LOAD_FAILED, f"the null model is configured to load only once, and {mark} exists")
    mark.touch()


if __name__ == "__main__":
    serve_worker(int(sys.argv[1]), build_null)
