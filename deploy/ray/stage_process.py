"""The process `relaxserve stage` of a machine that computes early stages for a replica: start it, pass on its log, end with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

from deploy.replicas.process import BOUND
from runtime.launch import command

LISTENS = re.compile(r"relaxserve stage at \S+ port (\d+)\n")
LOG_S = 1.0  # a process that it has started may keep the pipe open


class StageProcess:
    """`relaxserve stage` as a process that ends with this one."""

    def __init__(self, secret: str, address: str, port: int, num_threads: int) -> None:
        """Listen on `address`, on any port if `port` is 0. Raise OSError if that fails."""
        secret_fd = os.memfd_create("stage-secret")  # leaves no file, even if this process is killed
        try:
            os.write(secret_fd, secret.encode())
            listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            words = (*command("deploy.cli"), "stage", "--listen", listen, "--secret-file", f"/proc/self/fd/{secret_fd}")
            environment = {"RELAXSERVE_THREADS": str(num_threads), **os.environ}
            bound = (sys.executable, str(BOUND), str(os.getpid()), *words)
            self._process = subprocess.Popen(
                bound, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", pass_fds=[secret_fd]
            )
        finally:
            os.close(secret_fd)
        assert self._process.stderr is not None
        self._said = self._process.stderr
        try:
            found = self._wait_for_port()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._said.close()
            raise
        self.place = f"{listen.rpartition(':')[0]}:{found}"
        self._log = threading.Thread(target=self._pass_on, name="stage-log", daemon=True)
        self._log.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until it has ended, and its last lines are passed on."""
        self._process.wait()
        self._log.join(LOG_S)

    def _wait_for_port(self) -> str:
        """Return the port on which it listens. Other lines may come first: warnings of the dynamic linker or of Python."""
        lines: list[str] = []
        for line in self._said:
            if (found := LISTENS.fullmatch(line)) is not None:
                sys.stderr.writelines(lines)
                return found[1]
            lines.append(line)
        raise OSError(f"relaxserve stage did not start: {''.join(lines)}")

    def _pass_on(self) -> None:
        """Pass on what it writes. Ray keeps it with what this process writes."""
        with self._said:
            for line in self._said:
                sys.stderr.write(line)
