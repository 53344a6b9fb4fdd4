"""When a server process is stopped, running answers are finished or end with an error. No answer is cut off silently."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import children_of

PROGRAM = """
import sys
from contextlib import suppress
from deploy.logs import configure
from deploy.serve import ignore_field_warnings
from server.app import create_app
from server.http.server import Server
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker
from server.models.registry import Registry
from server.settings import ServerSettings
from server.models.state import ModelSpec

port, drain_s = int(sys.argv[1]), float(sys.argv[2])
settings = ServerSettings(port=port, drain_s=drain_s, lame_duck_s=float(sys.argv[4]))
configure(settings.log_level, settings.log_format)
ignore_field_warnings()
script = NullScript(answer=lambda _submit, _choice: [[120]] * int(sys.argv[3]), interval_s=0.05)
initial = [ModelSpec("null", "x")]
registry = Registry(settings, lambda _spec, progress: NullWorker(script, progress), lambda _: ByteTokenizer(), initial=initial)
with suppress(KeyboardInterrupt):
    Server(create_app(settings, registry), settings, registry).run()
"""


@pytest.fixture
def spawn(tmp_path):
    processes = []

    def start(
        drain_s: float, num_tokens: int = 40, *, lame_duck_s: float = 0.0, on_hangup: signal.Handlers = signal.SIG_DFL
    ) -> tuple[subprocess.Popen, str]:
        """Start a server process that handles SIGHUP as `on_hangup` states, even if the tests themselves run under nohup."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-c", PROGRAM, str(port), str(drain_s), str(num_tokens), str(lame_duck_s)]
        root = Path(__file__).parents[2]
        before = signal.signal(signal.SIGHUP, on_hangup)
        try:
            with (tmp_path / "log").open("w") as log:
                process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log)
        finally:
            signal.signal(signal.SIGHUP, before)
        processes.append(process)
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    return process, url
            except httpx.ConnectError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    yield start
    for process in processes:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()


def stream_through(process: subprocess.Popen, url: str, sent: signal.Signals = signal.SIGTERM) -> list[str]:
    body = {"prompt": "x", "stream": True, "max_tokens": 40}
    lines = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not lines:
                os.kill(process.pid, sent)
            lines += [line[6:]] if line.startswith("data: ") else []
    return lines


def test_an_answer_that_is_not_ready_in_time_is_refused(spawn):
    process, url = spawn(0.5)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 40}, timeout=120)
        while not re.search(r"^vllm:time_to_first_token_seconds_count{.*} [1-9]", httpx.get(f"{url}/metrics").text, re.MULTILINE):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        response = asking.result()
    assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"
    assert process.wait(120) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_running_answers_are_finished(spawn, sent):
    """Running answers are finished after SIGTERM, and after SIGHUP, which a process gets when its terminal is closed."""
    process, url = spawn(600)
    lines = stream_through(process, url, sent)
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
    assert process.wait(120) in (0, -sent)


def test_the_log_says_what_an_interrupt_waits_for(spawn, tmp_path):
    process, url = spawn(600)
    stream_through(process, url, signal.SIGINT)
    process.wait(120)
    said = [line.split(" ", 2)[2].strip() for line in (tmp_path / "log").read_text().splitlines()]
    assert said[-3:-2] + said[-1:] == [
        "stopping: running requests (1) have 600 s to finish; a second interrupt ends them now",
        "stopped",
    ]


def test_a_server_that_outlives_its_terminal_goes_on(spawn):
    process, url = spawn(600, on_hangup=signal.SIG_IGN)  # the server ignores SIGHUP, as under nohup
    lines = stream_through(process, url, signal.SIGHUP)
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
    assert httpx.get(f"{url}/health").status_code == 200


def test_what_does_not_finish_in_time_ends_by_an_error(spawn):
    process, url = spawn(0.5)
    lines = stream_through(process, url)
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["error"]["code"] == "shutting_down"
    assert len(lines) < 40
    assert process.wait(120) in (0, -signal.SIGTERM)


def test_a_lame_duck_is_not_ready_and_answers(spawn):
    """After SIGTERM the server fails the probe of readiness and still answers requests, each on a connection of its own. A second SIGTERM
    ends this."""
    process, url = spawn(600, num_tokens=4, lame_duck_s=3600)
    with httpx.Client(base_url=url) as client:
        assert client.get("/health/ready").status_code == 200
        os.kill(process.pid, signal.SIGTERM)
        while (ready := client.get("/v2/health/ready")).status_code == 200:
            time.sleep(0.01)
        assert ready.status_code == 503 and ready.json()["status"] == "shutting down"
        assert client.get("/health/ready").status_code == 503 and client.get("/v2/models/null/ready").status_code == 400
        assert client.get("/health/live").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        assert answer.status_code == 200 and answer.headers["connection"] == "close"
    lines = stream_through(process, url)  # sends the second SIGTERM within the stream
    assert lines[-1] == "[DONE]" and json.loads(lines[-2])["choices"][0]["finish_reason"] == "stop"
    assert process.wait(120) in (0, -signal.SIGTERM)


def test_a_lame_duck_stops_by_itself(spawn):
    process, _ = spawn(600, lame_duck_s=0.2)
    began_s = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(120) in (0, -signal.SIGTERM) and time.monotonic() - began_s >= 0.2


def test_an_interrupt_makes_no_lame_duck(spawn):
    process, _ = spawn(600, lame_duck_s=3600)
    os.kill(process.pid, signal.SIGINT)
    process.wait(120)


def test_a_second_interrupt_ends_streams_by_an_error(spawn):
    """After a second Ctrl-C the server does not wait for `drain_s`: running streams end with an error."""
    process, url = spawn(3600, num_tokens=4000)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 4000}, timeout=60) as response:
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        os.kill(process.pid, signal.SIGINT)
        while True:  # wait until the first signal is handled: a second signal before that would be lost
            try:
                httpx.get(f"{url}/health/live")
            except httpx.TransportError:
                break
        os.kill(process.pid, signal.SIGINT)
        heard = list(lines)
    assert heard[-1] == "[DONE]" and json.loads(heard[-2])["error"]["code"] == "shutting_down"
    assert len(heard) < 4000
    process.wait(60)


UNMETERED = """
from server.text.templates.meter import Meter
from server.text.templates.template import ChatTemplate

class Unmetered:
    def __reduce__(self):
        return unmetered, ()

def unmetered():
    Meter.step = Meter.charge = Meter._look = lambda *_: None
    return ChatTemplate("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", {})
"""
RENDERING = """
from unmetered_at_shutdown import Unmetered
from tests.doubles.worker import NullTemplate
from server.text.templates.renderer import Renderer
NullTemplate.renderer = lambda self: Renderer(Unmetered())
"""


def test_a_template_without_a_meter_does_not_outlive_sigterm(spawn, tmp_path, monkeypatch):
    """SIGTERM ends the server within `drain_s` + 5 s while templates without a meter render. A busy machine may be late once, so three
    servers may try."""
    (tmp_path / "unmetered_at_shutdown.py").write_text(UNMETERED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(f"{__name__}.PROGRAM", PROGRAM.replace("\nport, ", f"{RENDERING}\nport, "))
    drain_s, took_s = 1.0, []
    for _ in range(3):
        process, url = spawn(drain_s)
        body = {"model": "null", "messages": [{"role": "user", "content": "hi"}]}
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(httpx.post, f"{url}/v1/chat/completions", json=body, timeout=120) for _ in range(4)]
            while not renderings_of(process.pid):
                assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
            process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            process.wait(120)
            took_s.append(time.monotonic() - began_s)
            assert not any(answer.exception() is None and answer.result().status_code == 200 for answer in asked)
        if took_s[-1] < drain_s + 5:
            return
    raise AssertionError(f"the servers took {took_s} s to end")


def renderings_of(pid: int) -> bool:
    """Return whether the server's process of a template has a fork that renders, besides the fork that waits."""
    return any(len(children_of(child)) > 1 for child in children_of(pid))
