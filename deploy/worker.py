"""A model's worker process: `python -m deploy.worker [--log-level LEVEL] [--log-format FORM] FD`, where FD is its socket to the front.
Compiles or loads the model it is told to, then serves it."""

from __future__ import annotations

import gc
import sys

from deploy.loading.load import load_model
from server.engine.worker import LoadedModel, ProgressFn, serve_worker
from server.messages import Load
from server.pauses import collect_in_small_portions, switch_often


def main() -> None:
    switch_often()
    gc.freeze()  # modules: compiling need not look at them
    serve_worker(int(sys.argv[1]), build)


def build(load: Load, progress: ProgressFn) -> LoadedModel:
    model = load_model(load, progress)
    collect_in_small_portions()
    return model


if __name__ == "__main__":
    main()
