"""The server process of a replica of a fleet: start it, wait until it is ready, ask it, stop it."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPDefaultErrorHandler, HTTPErrorProcessor, HTTPHandler, HTTPSHandler, OpenerDirector, Request

import yaml

from deploy.bound import bound
from deploy.replicas.passed_log import PassedLog
from deploy.settings import PREFIX, gather, model_spec
from runtime.launch import command
from runtime.own_folder import OwnFolder
from server.messages import LOCAL
from server.signal_names import describe_status

FOLDER = "relaxserve-replica-"  # beginning of the name of the server's temporary folder
READY_POLL_S = 0.1
ASK_S = 5.0  # longest time for an answer to a question of the replica
# Settings that the replica decides. `drain_s` is longer than the grace period after which the engine of the fleet ends a replica: another
# replica then continues the requests that have not ended.
OWN = {"host": "127.0.0.1", "port": 0, "drain_s": 86400.0, "lame_duck_s": 0.0, "open_metrics": True, "batch_store_bytes": 0}
DECIDED = (*OWN, "kv_events", "kv_events_replay", "kv_events_name", "state_file")  # replicas of one machine cannot share a state file
DROPPED = frozenset(f"{PREFIX}{name.upper()}" for name in (*DECIDED, "config"))
USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StagePlaces:
    """The addresses of the early stages (all but the last), which are the same for all models, and the secret of these stages."""

    early: tuple[str, ...]
    secret: str = field(repr=False)


class ServerEnded(Exception):
    """The server process has ended."""


class ServerProcess:
    """One server on a port of its own. The kernel kills the server when this process ends."""

    access_key: str | None = None  # key with which `ask` asks the server, if its settings have keys

    def __init__(
        self,
        models: Sequence[str | dict[str, Any]],
        settings: Mapping[str, Any],
        *,
        address: str,
        num_threads: int | None = None,
        stages: StagePlaces | None = None,
    ) -> None:
        """Start the server. `settings` are those of its configuration file. Raise SettingsError if a setting is wrong. If the server has
        keys or is `insecure`, it listens on `address`, the address of this machine in the cluster; otherwise only this machine reaches it.
        Each model computes with `num_threads` threads, or with RELAXSERVE_THREADS if the environment has it. Without `stages`, models are
        not divided."""
        self.key = secrets.token_hex(16)
        self._folder = OwnFolder(Path(tempfile.gettempdir()), FOLDER)
        try:
            self._process = self._started(models, settings, address=address, num_threads=num_threads, stages=stages)
        except BaseException:
            self.clean()
            raise
        assert self._process.stderr is not None
        self._log = PassedLog(self._process.stderr)
        self._is_silent = False

    def _started(
        self,
        models: Sequence[str | dict[str, Any]],
        settings: Mapping[str, Any],
        *,
        address: str,
        num_threads: int | None,
        stages: StagePlaces | None,
    ) -> subprocess.Popen[str]:
        """Write the files of the server into its folder, and start its process."""
        folder = self._folder.path
        self.events = f"ipc://{folder}/events"
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED}
        config = folder / "relaxserve.yaml"
        written = {"models": list(models), **settings, **OWN, "kv_events": self.events}
        if stages is not None:
            secret = folder / "stage.secret"
            secret.write_text(stages.secret)  # others cannot read the folder
            written |= {"models": [_in_stages(entry, stages) for entry in models], "stage_secret_file": str(secret)}
            environment.pop(f"{PREFIX}STAGE_SECRET_FILE", None)
        config.write_text(yaml.safe_dump(written))
        found, _ = gather({}, environment, config=config)  # says what is wrong before a process starts
        host = address if found.has_api_keys or found.insecure else "127.0.0.1"
        port = _free_port(host)
        config.write_text(yaml.safe_dump({**written, "host": host, "port": port}))
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        environment |= {f"{PREFIX}INGRESS_KEY": self.key}
        if num_threads is not None:
            environment.setdefault(f"{PREFIX}THREADS", str(num_threads))
        words = bound((*command("deploy.cli"), "serve", "--config", str(config)))
        # In a process group of its own, the server gets no Ctrl-C of a terminal: this process stops the server when its requests have
        # ended.
        return subprocess.Popen(
            words, env=environment, process_group=0, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until the server has ended, and its last lines are passed on."""
        self._process.wait()
        self._log.wait()

    def wait_until_ready(self) -> None:
        """Wait until the server is ready. If the server ends first, remove its files and raise ServerEnded."""
        while True:
            try:
                self.require()
                self.ask("/health/ready")
                return
            except ServerEnded:
                self.clean()
                raise
            except OSError:
                time.sleep(READY_POLL_S)

    def require(self) -> None:
        """Raise ServerEnded if the server has ended."""
        if self.has_ended:
            raise ServerEnded(f"the server has ended ({describe_status(self._process.returncode)}): {self._log.last_lines()}")

    def require_answer(self) -> None:
        """Raise ServerEnded if the server has ended, and OSError if it does not answer."""
        self.require()
        try:
            self.ask("/health/live")
        except OSError:
            self._is_silent = True
            raise
        self._is_silent = False

    def num_requests(self) -> int:
        """Return the number of running and waiting requests. Raise OSError if the server does not answer."""
        return int(json.loads(self.ask("/load"))["server_load"])

    def pages_share(self) -> float:
        """Return the share of its pages that running requests use, for the model with the largest share."""
        return max((float(found) for found in USAGE.findall(self.ask("/metrics").decode())), default=0.0)

    def ask(self, path: str) -> bytes:
        """Return the body of the answer. Raise OSError if the server answers with an error, late or not at all."""
        return ask(self.url + path, self.access_key)

    def stop(self, within_s: float | None = None) -> None:
        """Let running requests end, then stop the server. Kill the server if it takes longer than `within_s` seconds. Without this limit,
        the engine of the fleet kills this process at the end of its grace period, and the kernel then kills the server. A server that did
        not answer the last health check is killed at once: its requests wait for another server. Remove the files of the server."""
        if self._is_silent:
            self._process.kill()
        else:
            self._process.terminate()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.wait()
        self.clean()

    def clean(self) -> None:
        """Remove the files of the server."""
        self._folder.remove()


def _direct() -> OpenerDirector:
    """Return an opener for requests to the replica's server. The opener has no handler for proxies, so it ignores proxies of the
    environment, and no handler for redirects, so a redirect raises HTTPError, and no other server gets the key."""
    opener = OpenerDirector()
    for handler in (HTTPHandler(), HTTPSHandler(), HTTPErrorProcessor(), HTTPDefaultErrorHandler()):
        opener.add_handler(handler)
    return opener


_opener = _direct()


def ask(url: str, key: str | None) -> bytes:
    """Return the body of the answer. Raise OSError if the server answers late or not at all, and HTTPError, which is an OSError, if it
    answers with an error."""
    request = Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with _opener.open(request, timeout=ASK_S) as answer:
            return answer.read()
    except HTTPException as error:
        raise OSError(f"the answer is broken off: {error!r}") from error
    except HTTPError as error:
        error.close()
        raise
    except URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None


def _in_stages(entry: str | dict[str, Any], stages: StagePlaces) -> dict[str, Any]:
    """Return an entry of `models` with the stages of the model: the early ones, and the server's own worker as the last."""
    if isinstance(entry, str):
        spec = model_spec(entry)
        entry = {"source": spec.source, "name": spec.name, "aliases": [*spec.aliases]}
    return {**entry, "stages": [*stages.early, LOCAL]}


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
