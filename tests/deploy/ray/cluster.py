"""A fleet on this machine: a local Ray, Serve, and an application of `deploy.ray`, started as users start it."""

from __future__ import annotations

import csv
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.conftest import ROOT
from tests.network import Machine

MARK = "FLEET_OF_TESTS"  # a variable in the environment of all processes of one fleet
MANIFEST = ROOT / "deploy" / "ray" / "rayservice.yaml"
RAY, SERVE = (str(Path(sys.executable).with_name(name)) for name in ("ray", "serve"))
START_S = 900.0
# Agents of a node whose ports are given: a node that finds ports itself gives up if its agents have not started after 15 s.
AGENTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "runtime-env-agent", "metrics-export")
STARTED = b"Ray runtime started."  # what a node writes when it has registered
FAILED = b"Exception importing application"  # what Ray writes when a fleet will never start


@dataclass
class Cluster:
    url: str
    mark: str
    config: Path
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    nodes: Sequence[subprocess.Popen[bytes]]  # of a Ray that was started before

    def servers(self) -> dict[int, str]:
        """Return the process ids of the replicas' servers that are ready, and their addresses."""
        found = {pid: address_of(pid) for pid in self.processes(b"relaxserve-replica-", b"deploy.cli")}
        return {pid: url for pid, url in found.items() if url is not None and _answers(f"{url}/health/ready")}

    def upgrade(self, **settings: Any) -> None:
        """Deploy the same pools with other settings of their servers."""
        document = yaml.safe_load(self.config.read_text())
        for pool in document["applications"][0]["args"]["pools"].values():
            pool["settings"] = settings
        self.config.write_text(yaml.safe_dump(document))
        dashboard = re.search(r"dashboard at \S*?(http://[\w.:]+)", self.log.read_text())
        assert dashboard is not None, self.log.read_text()[:4000]
        subprocess.run(
            [SERVE, "deploy", "--address", dashboard[1], str(self.config)], env=dict(self.environment), check=True, capture_output=True
        )

    def actors(self) -> list[int]:
        """Return the process ids of the replicas' actors."""
        return self.processes(b"ray::ServeReplica", b":replicas")

    def ingresses(self) -> list[int]:
        return self.processes(b"ray::ServeReplica", b":Ingress")

    def proxies(self) -> list[int]:
        """Return the process ids of the actors with Ray's own proxies."""
        return self.processes(b"ray::ProxyActor")

    def num_balanced(self) -> int:
        """Return among how many ingresses HAProxy distributes requests."""
        with suppress(httpx.HTTPError):
            page = httpx.get(f"http://127.0.0.1:{self.environment['RAY_SERVE_HAPROXY_STATS_PORT']}/stats;csv", timeout=30).text
            rows = [*csv.DictReader(page.splitlines())]
            return sum(row["svname"] != "BACKEND" and row["act"] == "1" and row["status"].startswith("UP") for row in rows)
        return 0

    def wait_for(self, num_servers: int) -> None:
        """Wait until so many replicas answer."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and all(process.poll() is None for process in (self.process, *self.nodes)):
            if len(self.servers()) >= num_servers and _answers(f"{self.url}/health/ready"):
                return
            if FAILED in self.log.read_bytes():
                break
            time.sleep(0.2)
        raise AssertionError(f"the fleet did not start: {self.log.read_text()[-4000:]}")

    def processes(self, *words: bytes) -> list[int]:
        """Return the process ids of the fleet whose command lines have these words."""
        return [pid for pid, line in marked(self.mark) if all(word in line for word in words)]


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Return the variables of the manifest that make Ray use HAProxy, and further ones that give it files and ports of its own, so that
    several fleets can run on this machine."""
    (container,) = yaml.safe_load(MANIFEST.read_text())["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    shipped = {entry["name"]: entry["value"] for entry in container["env"] if entry["name"].startswith("RAY_SERVE_")}
    own = {
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
        "METRICS_PORT": free_port(),
        "STATS_PORT": free_port(),
    }
    return shipped | {f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in own.items()}


def address_of(pid: int) -> str | None:
    """Read the address of a server in its configuration."""
    with suppress(OSError, KeyError, ValueError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        config = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
        return f"http://{config['host']}:{config['port']}"
    return None


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=30).status_code == 200
    return False


def marked(mark: str) -> Iterator[tuple[int, bytes]]:
    """Yield the processes of a fleet, with their command lines."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name), (folder / "cmdline").read_bytes()


@dataclass(frozen=True, slots=True)
class Node:
    """A node of Ray on this machine, or on another one."""

    num_cpus: int
    resources: Mapping[str, float] = field(default_factory=dict[str, float])  # names for what runs there only
    machine: Machine | None = None


@contextmanager
def running_fleet(
    cache_folder: Path,
    pools: Mapping[str, Any],
    num_servers: int,
    *,
    nodes: Sequence[Node] = (),
    deployments: Sequence[Mapping[str, Any]] = (),
    has_haproxy: bool = False,
) -> Generator[Cluster]:
    """Run a fleet until `num_servers` replicas answer. `nodes`: those of its Ray, the head first; one node by default. `deployments`:
    further entries of its configuration file. `has_haproxy`: HAProxy passes the bytes in place of Ray's own proxy, configured as in the
    manifest."""
    folder, mark = Path(tempfile.mkdtemp(prefix="fleet-")), secrets.token_hex(8)
    port = free_port()
    application = {"name": "relaxserve", "route_prefix": "/", "import_path": "deploy.ray.app:app", "args": {"pools": dict(pools)}}
    application |= {"deployments": [*deployments]} if deployments else {}
    config = folder / "config.yaml"
    http = {"host": "127.0.0.1", "port": port}
    config.write_text(yaml.safe_dump({"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}))
    own = {
        name: text for name, text in os.environ.items() if not name.startswith(("RELAXSERVE_", "RAY_SERVE_")) or name == "RELAXSERVE_TARGET"
    }
    environment = {
        **own,
        MARK: mark,
        "RELAXSERVE_CACHE": str(cache_folder),
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": f"{START_S:g}",  # otherwise a node gives up after 30 s
        "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token into the home folder
        **(haproxy_environment(folder) if has_haproxy else {}),
    }
    log = folder / "log"
    with ExitStack() as started, log.open("wb") as output:

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            started.callback(process.wait)
            return process

        started.callback(shutil.rmtree, folder, ignore_errors=True)
        started.callback(kill_marked, mark)
        address, processes = _start_nodes(nodes, start, log) if nodes else ("local", [])
        process = start(SERVE, "run", "--address", address, str(config))
        cluster = Cluster(f"http://127.0.0.1:{port}", mark, config, log, environment, process, processes)
        try:
            cluster.wait_for(num_servers)
            yield cluster
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            kill_marked(mark)


def _start_nodes(
    nodes: Sequence[Node], start: Callable[..., subprocess.Popen[bytes]], log: Path
) -> tuple[str, list[subprocess.Popen[bytes]]]:
    """Start the nodes of a Ray, one after the other, because a node does not wait for the head. Return the address of the head, and the
    processes of the nodes, which write to `log`."""
    machines = [node.machine for node in nodes if node.machine is not None]
    near = machines[0].near if machines else "127.0.0.1"
    address = f"{near}:{free_port()}"
    started: list[subprocess.Popen[bytes]] = []
    for node in nodes:
        is_head = node is nodes[0]
        words = ["--head", f"--port={address.rpartition(':')[2]}", f"--ray-client-server-port={free_port()}", "--include-dashboard=false"]
        more = words if is_head else [f"--address={address}"]
        process = start(
            *(node.machine.inside if node.machine is not None else ()),
            *(RAY, "start", "--block", "--disable-usage-stats", *more),
            f"--node-ip-address={near if node.machine is None else node.machine.far}",
            f"--num-cpus={node.num_cpus}",
            f"--resources={json.dumps(dict(node.resources))}",
            "--object-store-memory=100000000",
            *(f"--{name}-port={free_port()}" for name in AGENTS),
            *("--min-worker-port=0", "--max-worker-port=0"),  # other fleets on this machine use ports, too
        )
        started.append(process)
        _wait_for_nodes(started, log)
    return address, started


def _wait_for_nodes(started: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    """Wait until all of these nodes have registered."""
    end_s = time.monotonic() + START_S
    while log.read_bytes().count(STARTED) < len(started):
        assert all(process.poll() is None for process in started), f"a node of Ray has ended: {log.read_text()[-4000:]}"
        assert time.monotonic() < end_s, f"a node of Ray has not started: {log.read_text()[-4000:]}"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_marked(mark: str) -> None:
    for pid, _ in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
