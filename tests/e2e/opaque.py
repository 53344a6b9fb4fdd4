"""Run `relaxserve` with workers on the fake device of tests/runtime/device/opaque.py.

python -m tests.e2e.opaque serve ...      a server
python -m tests.e2e.opaque worker FD      a model's worker, which the server starts
"""

from __future__ import annotations

import sys

import deploy.serve
import deploy.worker
from deploy.cli import main
from runtime.device.registry import DEVICES

if __name__ == "__main__":
    DEVICES.update(dict.fromkeys(DEVICES, "tests.runtime.device.opaque"))
    if sys.argv[1] == "worker":
        print("a worker on the opaque device", file=sys.stderr, flush=True)
        del sys.argv[1]
        deploy.worker.main()
    else:
        deploy.serve.WORKER = (sys.executable, "-m", "tests.e2e.opaque", "worker")
        main()
