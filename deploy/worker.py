"""A model's worker process: `python -m deploy.worker FD`, where FD is its socket to the front. It loads the model that the front names,
compiles it if needed, and serves it."""

from __future__ import annotations

import gc
import os
import sys

from deploy.logs import configure
from deploy.model_loading.load import load_model
from runtime import flags
from runtime.remembered import remember_in
from server.engine.worker import LoadedModel, ProgressFn, serve_worker
from server.messages import Load
from server.pauses import collect_in_small_portions, switch_often


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the tokenizers of constraints use one core
    switch_often()
    if not (switches := flags.current()).no_cache:
        remember_in(switches.cache / "kernels")
    gc.freeze()  # exclude imported modules from the garbage collection while compiling
    serve_worker(int(sys.argv[1]), build)


def build(load: Load, progress: ProgressFn) -> LoadedModel:
    configure(load.log_level, load.log_format)
    model = load_model(load, progress)
    collect_in_small_portions()
    return model


if __name__ == "__main__":
    main()
