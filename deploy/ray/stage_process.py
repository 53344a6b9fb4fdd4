"""Run `relaxserve stage` as a process on a machine that computes early stages for a replica, and pass on its log."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from deploy.bound import bound
from deploy.replicas.passed_log import PassedLog
from runtime.launch import command

LISTENS = re.compile(r"relaxserve stage at \S+ port (\d+)\n")


class StageProcess:
    """A process `relaxserve stage` that ends with this process."""

    def __init__(self, secret: str, address: str, port: int, num_threads: int) -> None:
        """Start the process, which listens on `address`, on any port if `port` is 0. It computes with `num_threads` threads, unless the
        environment has RELAXSERVE_THREADS. Raise OSError if it does not start."""
        secret_fd = os.memfd_create("stage-secret")  # exists only in memory, so it leaves no file even if this process is killed
        try:
            os.write(secret_fd, secret.encode())
            listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            words = (*command("deploy.cli"), "stage", "--listen", listen, "--secret-file", f"/proc/self/fd/{secret_fd}")
            environment = {"RELAXSERVE_THREADS": str(num_threads), **os.environ}
            self._process = subprocess.Popen(
                bound(words), env=environment, stderr=subprocess.PIPE, text=True, errors="replace", pass_fds=[secret_fd]
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
        self._log = PassedLog(self._said)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until the process has ended and its last lines are passed on."""
        self._process.wait()
        self._log.wait()

    def _wait_for_port(self) -> str:
        """Return the port on which the process listens, which it prints. Warnings of the dynamic linker or of Python may come first; pass
        them on. Raise OSError if the process ends before."""
        lines: list[str] = []
        for line in self._said:
            if (found := LISTENS.fullmatch(line)) is not None:
                sys.stderr.writelines(lines)
                return found[1]
            lines.append(line)
        raise OSError(f"relaxserve stage did not start: {''.join(lines)}")
