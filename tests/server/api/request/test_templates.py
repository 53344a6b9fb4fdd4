"""If a chat template fails, the client gets an error that names the line of the template, and the server keeps running."""

from __future__ import annotations

import threading
import time

import pytest

from server.isolated.job import CallError, Failure
from server.text.templates.outside import OutsideTemplate
from tests.doubles.worker import ByteTokenizer

SOURCE = """{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}
{%- if 'round' in messages[-1].content -%}
{%- for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor -%}
{%- endif -%}
{%- if pattern %}{{ (pattern | safe).format(raise_exception) }}{% endif -%}"""


class TemplateTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.chat_template = OutsideTemplate(SOURCE, {})


TOKENIZER = TemplateTokenizer()
pytestmark = pytest.mark.parametrize("shared_server", [{"tokenizer": TOKENIZER}], indirect=True)


def render(server, **body):
    return server.http().post("/v1/chat/completions/render", json=body)


def test_a_client_s_format_reaches_nothing(server):
    """A format string in a request cannot read attributes of Python objects. In an earlier version, the format method of strings marked
    `safe` bypassed the sandbox."""
    response = render(
        server,
        messages=[{"role": "user", "content": "hi"}],
        chat_template_kwargs={"pattern": "{0.__globals__[sys].modules[os].environ}"},
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "template_failed")
    assert "line 5" in error["message"] and "expected a name or a number" in error["message"]


def test_arguments_with_a_lone_surrogate_stay_the_text_they_were(server):
    """If the arguments of a call contain a lone surrogate, the template receives them as unparsed text. The check of the request body does
    not find the surrogate, because the arguments are JSON inside a JSON string."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    response = render(server, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert response.status_code == 200, response.text
    response.json()["prompt"].encode()


def test_arguments_that_nest_too_deeply_do_not_fail_the_server(server):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    assert render(server, messages=[{"role": "assistant", "tool_calls": [call]}]).status_code in (200, 400)


def test_a_message_on_which_the_template_never_ends_holds_up_nobody(server):
    """One client's message makes the template loop until its time limit. Meanwhile the front answers other requests; then that client gets
    status 400."""
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.chat(messages=[{"role": "user", "content": "round"}])))
    asking.start()
    client, num_answered, began_s = server.http(), 0, time.thread_time()
    while asking.is_alive():
        assert client.get("/health/live").status_code == 200
        num_answered += 1
    asking.join()
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["code"]) == (400, "template_failed")
    assert "longer than 2 s" in error["message"]
    assert num_answered > 10, f"in {time.thread_time() - began_s} s of this thread"


def test_a_busy_server_asks_for_another_try(server, monkeypatch):
    """Nothing is wrong with the messages if no process could render them in time, so the client is not told to change them."""

    async def late(_work):
        raise CallError(Failure.LATE)

    monkeypatch.setattr(TOKENIZER.chat_template.renderer()._calls, "call", late)
    response = server.chat(messages=[{"role": "user", "content": "hi"}])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "template_not_rendered")
    assert response.headers["x-should-retry"] == "true" and "busy" in response.json()["error"]["message"]
