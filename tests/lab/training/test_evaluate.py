"""The examiner of the demo model: the requests that it sends, and how it reads and grades answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.lab.training.evaluate import Server, report
from tests.lab.training.exam import Question, questions, same_fields

CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}


class Api(ThreadingHTTPServer):
    """A fake server that records the requests and answers each with the same tool call."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pick(skill: str) -> list[Question]:
    return [question for question in questions(5, 20) if question.skill == skill]


def test_a_call_that_came_over_http_counts_as_the_call_it_is(api: Api):
    [answer] = Server(f"http://127.0.0.1:{api.server_port}/v1/", "demo").answers(pick("animals")[:1])
    assert answer["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Rome"}}
    [sent] = api.requests
    assert sent["model"] == "demo" and sent["temperature"] == 0 and "tools" not in sent


def test_calls_and_results_are_sent_as_the_api_wants_them(api: Api):
    asked = pick("tool results")
    Server(f"http://127.0.0.1:{api.server_port}/v1", "demo").answers(asked)
    assert len(api.requests) == len(asked) > 5
    for sent in api.requests:
        assert sent["tools"]
        called = [call for message in sent["messages"] for call in message.get("tool_calls", ())]
        answered = [message["tool_call_id"] for message in sent["messages"] if message["role"] == "tool"]
        assert [call["id"] for call in called] == answered and len(set(answered)) == len(answered)
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in called)


def test_a_schema_is_sent_and_any_layout_of_its_fields_is_right(api: Api):
    asked = pick("JSON by schema")
    Server(f"http://127.0.0.1:{api.server_port}/v1", "demo").answers(asked)
    sent = sorted(json.dumps(request["response_format"]["json_schema"]["schema"]) for request in api.requests)
    assert sent == sorted(json.dumps(question.schema) for question in asked)
    for question in asked:
        fields = json.loads(question.expected["content"])
        assert list(fields) == question.schema["required"]
        assert question.is_right({"role": "assistant", "content": json.dumps(fields, indent=2)})
        assert not question.is_right({"role": "assistant", "content": json.dumps({**fields, "legs": 80})})
        assert not question.is_right({"role": "assistant", "content": question.expected["content"][:-1]})


def test_no_sound_may_be_an_empty_text_and_nothing_else():
    silent = {"animal": "ant", "facts": {"sound": None}}
    assert same_fields(silent, {"role": "assistant", "content": '{"animal": "ant", "facts": {"sound": ""}}'})
    assert not same_fields(silent, {"role": "assistant", "content": '{"animal": "ant", "facts": {"sound": "hiss"}}'})


def test_the_report_counts_per_skill_and_shows_failures():
    asked = [*pick("animals")[:3], *pick("capitals")[:1]]
    wrong = {"role": "assistant", "content": "Bananas."}
    text = report(asked, [wrong, *(question.expected for question in asked[1:])], failures=1)
    assert "| animals | 2 / 3 | 66.7% |" in text
    assert "| capitals | 1 / 1 | 100.0% |" in text
    assert "| all | 3 / 4 | 75.0% |" in text
    assert text.splitlines()[-1].startswith("[animals]") and "'Bananas.'" in text
