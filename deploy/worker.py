"""A model's worker process: `python -m deploy.worker [--log-level LEVEL] [--log-format FORM] FD`, where FD is its socket to the front. It
loads the model that the front names, compiles it if needed, and serves it."""

from __future__ import annotations

import argparse
import gc

from deploy.logs import configure
from deploy.model_loading.load import load_model
from server.engine.worker import LoadedModel, ProgressFn, serve_worker
from server.messages import Load
from server.pauses import collect_in_small_portions, switch_often


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.worker")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("fd", type=int)
    given = parser.parse_args()
    configure(given.log_level, given.log_format)
    switch_often()
    gc.freeze()  # exclude imported modules from the garbage collection while compiling
    serve_worker(given.fd, build)


def build(load: Load, progress: ProgressFn) -> LoadedModel:
    model = load_model(load, progress)
    collect_in_small_portions()
    return model


if __name__ == "__main__":
    main()
