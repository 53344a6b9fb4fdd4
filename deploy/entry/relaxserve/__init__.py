"""The command `relaxserve`, and `python -m relaxserve`: make sure that imports find the packages of this installation, because other
software also uses names such as `runtime` and `server`. Then run the command line."""

from __future__ import annotations

import signal
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the command that the arguments name. An interrupt during the imports ends the process without a traceback."""
    if (interrupt := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    _load_launch()
    from deploy.cli import imported

    run = imported()
    signal.signal(signal.SIGINT, interrupt)
    run()


def _load_launch() -> None:
    """Load `runtime/launch.py` by its path, because the name `runtime` may belong to another package. The folder `runtime` is next to this
    package in an installation, and two levels higher in a checkout."""
    file = next(file for root in (_HERE.parent, _HERE.parents[2]) if (file := root / "runtime" / "launch.py").is_file())
    spec = spec_from_file_location("relaxserve.launch", file)
    assert spec is not None and spec.loader is not None, "a file of Python has a loader"
    launch = module_from_spec(spec)
    spec.loader.exec_module(launch)
    launch.prepare_imports()
