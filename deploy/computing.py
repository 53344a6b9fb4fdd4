"""Begin a process that computes a model: a worker, or an early stage of one."""

from __future__ import annotations

import gc
import os

from runtime import flags
from runtime.remembered import remember_in
from server.pauses import switch_often


def begin_process() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers of constraints use one core
    switch_often()
    if not (switches := flags.current()).no_cache:
        remember_in(switches.cache / "kernels")
    gc.freeze()  # exclude imported modules from the garbage collection while compiling
