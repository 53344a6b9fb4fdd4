"""Run the command `relaxserve` in a fork of a process that has already imported its modules.

Importing the modules takes longer than most commands run. Each fork has its own arguments, environment, standard streams and exit status,
and runs the installed script to its end. Modules in `deploy.cli` are not imported in advance.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = """#!{python}
import sys
sys.path.insert(0, {entry!r})
from relaxserve import main
main()
"""


def commands(installed: Path = Path(sys.executable).parent) -> Path:
    """Return the folder in which the command `relaxserve` is installed. If it is not, as on a machine that only runs the tests marked
    `gpu`, make a folder with a command that runs the checkout."""
    if (installed / "relaxserve").is_file():
        return installed
    folder = Path(tempfile.mkdtemp(prefix="relaxserve-command-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = folder / "relaxserve"
    command.write_text(COMMAND.format(python=sys.executable, entry=str(ROOT / "deploy" / "entry")))
    command.chmod(0o755)
    return folder


class ForkServer:
    """Runs `relaxserve` commands in forks of one process. This process starts with the first command."""

    def __init__(self, command: Path) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            said = [Path(folder, name) for name in ("stdout", "stderr")]
            process.stdin.write(json.dumps([list(arguments), dict(environment), *map(str, said)]) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                self.close()
                raise subprocess.TimeoutExpired(arguments, timeout_s)
            return subprocess.CompletedProcess(arguments, int(process.stdout.readline()), *(file.read_text() for file in said))

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            # Only a process with a single thread can be forked safely, so OpenBLAS must not start threads.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-P", __file__, str(self._command)]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main(command: str) -> None:
    package = find_spec("relaxserve")
    assert package is not None and package.origin is not None
    sys.path.insert(0, str(Path(package.origin).resolve().parents[3]))  # the source tree of the installed command
    import deploy.generate
    import deploy.serve
    import deploy.worker

    assert deploy.generate and deploy.serve and deploy.worker
    assert not any(name.startswith("deploy.cli") for name in sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "an imported module has started a thread"
    gc.freeze()
    while line := sys.stdin.readline():
        arguments, environment, stdout, stderr = json.loads(line)
        if (process := os.fork()) == 0:
            _become(environment, stdout, stderr)
            sys.argv = [command, *arguments]
            runpy.run_path(command, run_name="__main__")
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _become(environment: Mapping[str, str], stdout: str, stderr: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    flags = os.O_WRONLY | os.O_CREAT
    for descriptor, opened in enumerate((os.open(os.devnull, os.O_RDONLY), os.open(stdout, flags), os.open(stderr, flags))):
        os.dup2(opened, descriptor)
        os.close(opened)


if __name__ == "__main__":
    main(sys.argv[1])
