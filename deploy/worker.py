"""A model's worker process: `python -m deploy.worker FD`, where FD is its socket to the front. Compiles or loads the model it is told to,
then serves it."""

from __future__ import annotations

import gc
import sys

from deploy.loading.load import load_model
from server.engine.worker import serve_worker
from server.threads import switch_often


def main() -> None:
    switch_often()
    gc.freeze()  # modules stay; the collector need not look at them again
    serve_worker(int(sys.argv[1]), load_model)


if __name__ == "__main__":
    main()
