"""Server-sent events: their format, heartbeats, errors, and clients that disconnect."""

from __future__ import annotations

import re
import time
from pathlib import Path

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hi"}]


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_framing(server):
    response = server.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    blocks = response.text.split("\n\n")
    assert blocks[-1] == "" and blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])


def test_only_one_module_writes_events():
    root = Path(__file__).parents[4] / "server"
    writers = [path.name for path in root.rglob("*.py") if re.search(r"""["']data: """, path.read_text())]
    assert writers == ["sse.py"]


def test_tokens_are_not_held_up(serve, answering):
    server = serve(script=answering("x" * 400, interval_s=0.05))
    stream = server.openai().chat.completions.create(model="null", messages=MESSAGES, stream=True)
    next(stream)
    assert server.worker.running, "the first chunk was held back until the last"
    stream.close()


def test_heartbeats_while_the_prompt_is_read(serve, answering):
    """The client receives heartbeats while the server prefills its prompt, and none after the first chunk. The prefill of the first request
    would take 300 s, but the client disconnects after two heartbeats, so the test does not depend on the speed of the machine."""
    server = serve(script=answering("ok", prefill_s=300), heartbeat_s=0.1)
    with server.http().stream("POST", "/v1/chat/completions", json={"messages": MESSAGES, "stream": True}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(3)] == [": still working", "", ": still working"]
    server.worker.script.prefill_s = 0.5
    assert ": still" not in server.chat(stream=True).text.partition("data: ")[2]
    text = [c.choices[0].delta.content for c in server.openai().chat.completions.create(model="null", messages=MESSAGES, stream=True)]
    assert "".join(text) == "ok"  # an OpenAI client skips the heartbeats


def test_an_early_failure_has_a_status(serve, answering):
    response = serve(script=answering("abc", fail_after=0)).chat(stream=True)
    assert response.status_code == 500 and response.json()["error"]["code"] == "generation_failed"


def test_a_late_failure_is_an_event(serve, answering):
    server = serve(script=answering("abcdef", fail_after=3))
    stream = server.openai().chat.completions.create(model="null", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "abc" and "script" in str(caught.value) and caught.value.code == "generation_failed"
    assert server.chat(stream=True).text.endswith("data: [DONE]\n\n")


def test_an_unforeseen_failure_is_an_event_too(serve, answering):
    script = answering("abcdef")
    script.answer = lambda _submit, _choice: [[97], [98], ["no token"]]
    server = serve(script=script)
    response = server.chat(stream=True)
    assert '"code":"internal_error"' in response.text and response.text.endswith("data: [DONE]\n\n")
    assert "no token" not in response.text  # the client does not see the cause, which is only logged
    assert server.chat().status_code == 500


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_work(serve, answering, stream):
    server = serve(script=answering("x" * 4000, interval_s=0.01))
    client = server.http()
    body = {"messages": MESSAGES, "stream": stream}
    request = client.build_request("POST", "/v1/chat/completions", json=body, timeout=10.0 if stream else 0.5)
    if stream:
        response = client.send(request, stream=True)
        next(response.iter_lines())
        response.close()
    else:
        with pytest.raises(Exception, match="timed out"):
            client.send(request)
        client.close()
    wait_until(lambda: server.worker.aborted and not server.worker.running)
    admission = server.registry.models()[0].loaded.admission
    assert (admission.num_sequences, admission.num_queued_tokens) == (0, 0)
    metrics = server.http().get("/metrics").text
    assert 'relaxserve:requests_cancelled_total{engine="0",model_name="null",stage="decode"} 1.0' in metrics


def test_leaving_during_the_prompt_ends_the_work(serve, answering):
    server = serve(script=answering("x", prefill_s=30))
    client = server.http(headers={})
    client.timeout = 0.2
    with pytest.raises(Exception, match="timed out"):
        client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    client.close()
    wait_until(lambda: server.worker.aborted)
    assert 'stage="prefill"} 1.0' in server.http().get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_deadline_tells_what_was_generated(serve, answering, stream):
    server = serve(script=answering("x" * 4000, interval_s=0.01))
    response = server.chat(timeout=1.5, stream=stream)
    if stream:
        assert response.status_code == 200 and '"code":"deadline_exceeded"' in response.text
        assert '"completion_tokens":' in response.text.partition("deadline_exceeded")[2]
    else:
        assert response.status_code == 504
        assert 0 < response.json()["error"]["usage"]["completion_tokens"] < 4000


def test_deadline_holds_even_if_the_worker_forgets_it(serve, answering):
    response = serve(script=answering("x", prefill_s=30)).chat(timeout=0.1)
    assert response.status_code == 504 and response.json()["error"]["usage"]["completion_tokens"] == 0
