"""Begin a process that computes a model: its worker, or a stage in another process."""

from __future__ import annotations

import gc
import os

from runtime import flags
from runtime.remembered import remember_in
from server.pauses import switch_often


def begin_process() -> None:
    """Set up this process before it compiles: use one core for tokenizers unless the environment says otherwise, let threads switch often,
    remember LLVM's results (runtime/remembered.py) unless the cache is disabled, and exclude the objects that exist now from garbage
    collection."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers of constraints use one core
    switch_often()
    if not (switches := flags.current()).no_cache:
        remember_in(switches.cache / "kernels")
    gc.freeze()  # exclude imported modules from the garbage collection while compiling
