"""A model's worker process: `python -m deploy.worker FD`, where FD is its socket to the front. It loads the model that the front names,
compiles it if needed, and serves it."""

from __future__ import annotations

import sys

from deploy.computing import begin_process
from deploy.logs import configure
from deploy.model_loading.load import load_model
from runtime import generated_code
from server.engine.worker import LoadedModel, ProgressFn, serve_worker
from server.free_memory import return_free_memory
from server.messages import Load
from server.pauses import collect_in_small_portions


def main() -> None:
    begin_process()
    serve_worker(int(sys.argv[1]), build)


def build(load: Load, progress: ProgressFn) -> LoadedModel:
    """Load a model as the message asks. Set up the log before, and afterwards prepare this process for serving."""
    configure(load.log_level, load.log_format)
    model = load_model(load, progress)
    generated_code.keep()
    collect_in_small_portions()
    return_free_memory()
    return model


if __name__ == "__main__":
    main()
