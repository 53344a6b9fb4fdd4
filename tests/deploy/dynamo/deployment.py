"""Dynamo on this machine: its frontend and workers, started as users start them, which find each other by files."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.conftest import ROOT
from tests.deploy.ray.cluster import MARK, address_of, free_port, kill_marked, marked

START_S = 600.0


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    def server(self) -> tuple[int, str] | None:
        """Return the process id and the address of the worker's own server."""
        for pid, line in marked(self.mark):
            if b"relaxserve-replica-" in line and b"deploy.cli" in line and (url := address_of(pid)) is not None:
                return pid, url
        return None

    def num_running(self) -> int:
        found = self.server()
        assert found is not None, self.log.read_text()[-4000:]
        return httpx.get(f"{found[1]}/load", timeout=60, trust_env=False).json()["server_load"]


@dataclass
class Deployment:
    url: str
    folder: Path
    environment: dict[str, str]
    frontend_log: Path
    started: ExitStack
    workers: list[Worker] = field(default_factory=list[Worker])

    def add_worker(self, *words: str, **variables: str) -> Worker:
        mark, log = secrets.token_hex(8), self.folder / f"worker-{len(self.workers)}.log"
        command = [sys.executable, "-m", "deploy.cli", "dynamo", *words]
        worker = Worker(self.start(command, log, {MARK: mark, **variables}), mark, log)
        self.started.callback(kill_marked, mark)
        self.workers.append(worker)
        return worker

    def start(self, command: Sequence[str], log: Path, more: dict[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment | more, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        self.started.callback(_end, process)
        return process

    def num_workers(self) -> int:
        """Return how many workers the frontend knows."""
        with suppress(httpx.HTTPError, ValueError):
            found = httpx.get(f"{self.url}/health", timeout=60, trust_env=False).json()
            return sum(one.get("endpoint") == "generate" for one in found.get("instances", ()))
        return 0

    def wait_for(self, num: int) -> None:
        """Wait until the frontend sends requests to so many workers."""

        def is_there() -> bool:
            for worker in self.workers:
                assert worker.process.poll() is None or num < len(self.workers), worker.log.read_text()[-4000:]
            return self.num_workers() == num and (num == 0 or "demo" in self.models())

        wait_until(is_there, lambda: f"{num} workers: {self.num_workers()}, {self.frontend_log.read_text()[-3000:]}")

    def models(self) -> list[str]:
        with suppress(httpx.HTTPError, ValueError, KeyError):
            return [entry["id"] for entry in httpx.get(f"{self.url}/v1/models", timeout=60, trust_env=False).json()["data"]]
        return []


@contextmanager
def running_dynamo(cache_folder: Path, *words: str) -> Generator[Deployment]:
    """Run Dynamo's frontend with these options."""
    folder = Path(tempfile.mkdtemp(prefix="dynamo-"))
    own = {name: text for name, text in os.environ.items() if not name.startswith(("RELAXSERVE_", "DYN_")) or name == "RELAXSERVE_TARGET"}
    environment = {
        **own,
        "RELAXSERVE_CACHE": str(cache_folder),
        "RELAXSERVE_THREADS": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "registry"),
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
        "HOME": str(folder),  # Dynamo copies the files of models there
        "PYTHONPATH": str(ROOT),
    }
    port = free_port()
    with ExitStack() as started:
        started.callback(shutil.rmtree, folder, ignore_errors=True)
        log = folder / "frontend.log"
        deployment = Deployment(f"http://127.0.0.1:{port}", folder, environment, log, started)
        command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *words]
        deployment.start(command, log, {})
        yield deployment


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    end_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {START_S:g} s: {what()}"
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
    process.kill()
    process.wait()
