"""Tools of MCP servers in /v1/responses: items, events, approvals, and what servers and requests may not do.

The error of a call is an object, as in OpenAI's client; OpenAI's document, which is older, has a text.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from runtime.fits import Tiles
from server.api.answer.generate import Generation
from server.defaults import Defaults
from server.messages import Submit, Vision
from server.models.state import ModelSpec
from server.settings import ServerSettings, SettingsError
from tests.doubles.mcp_server import Behaviour, serving, tool
from tests.doubles.worker import NullScript
from tests.server.api.vendors.test_openai import RESPONSES, WHOLE, event_validator, events_of, require_valid, validator
from tests.server.images.files import data_url, encoded, image

HERMES = (ModelSpec("null", "null", tool_parser="hermes"),)
ADD = {"type": "function", "name": "local", "parameters": {"type": "object", "properties": {}}}
Start = Callable[..., "Both"]


class Both:
    """A server, and an MCP server that it may call. The model's answers are `turns`, one after another: the number of results of calls in
    its prompt says which is next."""

    def __init__(self, serve: Any, url: str, behaviour: Behaviour, turns: list[str], options: dict[str, Any]) -> None:
        self.behaviour, self.url, self.turns = behaviour, url, turns
        script = NullScript(answer=self._answer, vision=options.pop("vision", None))
        self.server = serve(script=script, **{"initial": HERMES, "mcp_servers": (f"math={url}",), **options})
        self.http: httpx.Client = self.server.http()

    def _answer(self, submit: Submit, _choice: int) -> list[list[int]]:
        num_results = self.prompt_of(submit).count("<|tool|>")
        return [[byte] for byte in self.turns[min(num_results, len(self.turns) - 1)].encode()]

    @staticmethod
    def prompt_of(submit: Submit) -> str:
        return bytes(i for i in submit.prompt_ids if i < 256).decode()

    @property
    def prompts(self) -> list[str]:
        return [self.prompt_of(submit) for submit in self.server.worker.submits]

    def post(self, *, offer: dict[str, Any] | None = None, tools: tuple[Any, ...] = (), **body: Any) -> httpx.Response:
        offered = {"type": "mcp", "server_label": "math", "require_approval": "never", **(offer or {})}
        return self.http.post("/v1/responses", json={"model": "null", "input": "hi", "tools": [offered, *tools], **body})

    def ask(self, **body: Any) -> dict[str, Any]:
        """Return the response, which agrees with OpenAI's document and with the client's own type."""
        response = self.post(**body)
        assert response.status_code == 200, response.text
        require_valid(validator(RESPONSES, WHOLE), as_documented(response.json()), body)
        Response.model_validate_json(response.text, strict=True)
        return response.json()

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        events = events_of(self.post(stream=True, **body))
        for event in events:
            require_valid(event_validator(event["type"]), as_documented(event), body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events


def as_documented(value: Any) -> Any:
    """Return the answer with the errors of MCP calls as JSON texts."""
    if isinstance(value, list):
        return [as_documented(part) for part in value]
    if not isinstance(value, dict):
        return value
    found = {name: as_documented(part) for name, part in value.items()}
    return {**found, "error": json.dumps(value["error"])} if value.get("type") == "mcp_call" and value.get("error") else found


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.fixture
def both(serve: Any) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(*turns: str, behaviour: Behaviour | None = None, **options: Any) -> Both:
            behaves = behaviour or Behaviour()
            return Both(serve, stack.enter_context(serving(behaves)), behaves, list(turns), options)

        yield start


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_the_model_calls_tools_until_it_answers(both: Start) -> None:
    one = both(call("add", a=2, b=3) + call("add", a=4, b=5), "", call("fail"), "Five.")
    made = one.ask()
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call", "message"]
    listed, first, second = made["output"][:3]
    assert [entry["name"] for entry in listed["tools"]][:2] == ["add", "echo"] and listed["tools"][0]["annotations"] == {
        "readOnlyHint": True
    }
    assert (first["name"], json.loads(first["arguments"]), first["output"], first["error"]) == ("add", {"a": 2, "b": 3}, "5", None)
    assert second["output"] == "9" and made["status"] == "completed"
    assert made["usage"]["output_tokens"] == sum(len(turn) for turn in (one.turns[0], one.turns[2], one.turns[3]))
    assert one.prompts[-1].count("<|tool|>") == 3 and "<|tool|>5\n" in one.prompts[-1] and "<|tool|>it does not work" in one.prompts[-1]
    failed = made["output"][3]
    assert (failed["status"], failed["output"]) == ("failed", None)
    assert failed["error"] == {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "it does not work"}]}


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.mcp_list_tools.in_progress",
    "response.mcp_list_tools.completed",
    "response.output_item.done",
    "response.output_item.added",
    "response.mcp_call.in_progress",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.mcp_call.completed",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_stream_has_openais_events_in_their_order(both: Start) -> None:
    one = both(call("add", a=2, b=3), "Five.")
    events = one.stream()
    seen = [event["type"] for at, event in enumerate(events) if at == 0 or event["type"] != events[at - 1]["type"]]
    assert seen == EVENTS
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done and one.http.get(f"/v1/responses/{last['id']}").json() == last
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.mcp_call_arguments.delta")
    assert json.loads(deltas) == {"a": 2, "b": 3}


def test_a_follow_up_does_not_list_the_tools_again(both: Start) -> None:
    one = both(call("add", a=2, b=3), "Five.")
    first = one.ask()
    num_seen = len(one.behaviour.seen)
    second = one.ask(previous_response_id=first["id"], input="more")
    assert kinds(second) == ["message"] and len(one.behaviour.seen) == num_seen
    assert one.prompts[-1].startswith(one.prompts[1])  # so that the prefix is cached
    items = one.http.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in items] == ["message", "mcp_list_tools", "mcp_call", "message", "message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_waits_for_approval(both: Start, stream: bool) -> None:
    one = both(call("add", a=2, b=3), "Five.")
    if stream:
        events = one.stream(offer={"require_approval": "always"})
        assert [event["type"] for event in events][-3:] == ["response.output_item.added", "response.output_item.done", "response.completed"]
        first = events[-1]["response"]
    else:
        first = one.ask(offer={"require_approval": None})
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"] and not one.behaviour.waiting.is_set()
    asked = first["output"][1]
    assert (asked["name"], json.loads(asked["arguments"])) == ("add", {"a": 2, "b": 3})
    assert not [seen for seen in one.behaviour.seen if seen["method"] == "tools/call"]
    answer = [{"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}]
    second = one.ask(previous_response_id=first["id"], input=answer, offer={"require_approval": "always"})
    assert kinds(second) == ["mcp_call", "message"]
    assert (second["output"][0]["output"], second["output"][0]["approval_request_id"]) == ("5", asked["id"])
    third = one.ask(previous_response_id=second["id"], input="again", offer={"require_approval": "always"})
    assert kinds(third) == ["message"]  # the call is not made twice


def test_an_approved_call_is_streamed(both: Start) -> None:
    one = both(call("add", a=2, b=3), "Five.")
    first = one.ask(offer={"require_approval": "always"})
    answer = [{"type": "mcp_approval_response", "approval_request_id": first["output"][1]["id"], "approve": True}]
    events = one.stream(previous_response_id=first["id"], input=answer)
    assert [event["type"] for event in events][2:7] == [
        "response.output_item.added",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.output_item.done",
    ]


def test_a_refused_call_is_told_to_the_model(both: Start) -> None:
    one = both(call("add", a=2, b=3), "Then not.")
    first = one.ask(offer={"require_approval": "always"})
    answer = [{"type": "mcp_approval_response", "approval_request_id": first["output"][1]["id"], "approve": False, "reason": "too costly"}]
    second = one.ask(previous_response_id=first["id"], input=answer, offer={"require_approval": "always"})
    assert kinds(second) == ["message"] and "<|tool|>The user did not approve this call: too costly" in one.prompts[-1]
    stray = one.post(input=[{**answer[0], "approval_request_id": "mcpr_1"}])
    assert stray.status_code == 400 and stray.json()["error"]["param"] == "input[0].approval_request_id"


@pytest.mark.parametrize(
    ("rules", "asks"),
    [
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"read_only": True}}, False),
        ({"never": {"read_only": False}}, True),
        ({"always": {"tool_names": ["add"]}, "never": {"read_only": True}}, True),
        ({"always": {"tool_names": ["echo"]}}, True),
    ],
)
def test_rules_say_which_calls_need_approval(both: Start, rules: Any, asks: bool) -> None:
    made = both(call("add", a=2, b=3), "Five.").ask(offer={"require_approval": rules})
    assert ("mcp_approval_request" in kinds(made)) == asks


@pytest.mark.parametrize("allowed", [["echo"], {"tool_names": ["echo"]}, {"read_only": False, "tool_names": ["echo", "add"]}])
def test_only_allowed_tools_are_offered(both: Start, allowed: Any) -> None:
    one = both("Fine.")
    made = one.ask(offer={"allowed_tools": allowed})
    assert '"name": "echo"' in one.prompts[-1] and '"name": "add"' not in one.prompts[-1]
    assert len(made["output"][0]["tools"]) == 13  # the list itself is whole


def test_a_function_of_the_client_ends_the_response(both: Start) -> None:
    one = both(call("add", a=2, b=3) + call("local"), "Five.")
    made = one.ask(tools=(ADD,))
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "function_call"] and made["output"][1]["output"] == "5"
    result = [{"type": "function_call_output", "call_id": made["output"][2]["call_id"], "output": "done"}]
    assert kinds(one.ask(previous_response_id=made["id"], input=result, tools=(ADD,))) == ["message"]


def test_equal_names_are_told_apart(both: Start) -> None:
    one = both(call("math_local"), "Fine.", behaviour=Behaviour(tools=[tool("local")]))
    made = one.ask(tools=(ADD,))
    assert made["output"][1]["name"] == "local" and made["output"][1]["type"] == "mcp_call"
    assert one.behaviour.seen[-1]["params"]["name"] == "local"


def test_a_choice_can_demand_a_tool_of_a_server(both: Start) -> None:
    one = both(call("add", a=2, b=3), "Five.")
    choice = {"type": "mcp", "server_label": "math", "name": "add"}
    made = one.ask(tool_choice=choice)
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "message"] and made["tool_choice"] == choice
    demanded, later = one.server.worker.submits
    assert demanded.params.constraint is not None and demanded.params.constraint.trigger is None
    assert later.params.constraint is None or later.params.constraint.trigger is not None
    failed = one.post(tool_choice={"type": "mcp", "server_label": "math", "name": "nothing"})
    assert failed.status_code == 400 and failed.json()["error"]["param"] == "tool_choice"


def test_a_turn_arrives_when_it_begins(both: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times to the first token and in the queue leave out the turns and calls before."""
    arrivals: list[float] = []

    class Noted(Generation):
        def __init__(self, loaded: Any, job: Any, metrics: Any, caller: Any) -> None:
            super().__init__(loaded, job, metrics, caller)
            arrivals.append(caller.arrived_s)

    monkeypatch.setattr("server.api.openai.responses.endpoint.Generation", Noted)
    both(call("add", a=2, b=3), call("add", a=2, b=3), "Five.").ask()
    unused, first, second, third = arrivals
    assert unused == first < second < third


def test_calls_are_limited(both: Start) -> None:
    one = both(*[call("add", a=number, b=0) for number in range(9)])
    made = one.ask(max_tool_calls=2)
    assert [item["output"] for item in made["output"] if item["type"] == "mcp_call"] == ["0", "1"]
    assert "<tools>" not in one.prompts[-1] and made["status"] == "completed"


def test_the_length_of_all_turns_is_limited(both: Start) -> None:
    first = call("add", a=2, b=3)
    one = both(first, "Five, as everybody knows.")
    made = one.ask(max_output_tokens=len(first) + 4)
    assert made["status"] == "incomplete" and made["output"][-1]["content"][0]["text"] == "Five"
    cut = one.ask(max_output_tokens=len(first) - 30)
    assert cut["status"] == "incomplete" and cut["output"][1]["status"] == "incomplete" and cut["output"][1]["output"] is None


def test_calls_of_a_turn_that_is_cut_short_are_not_made(both: Start) -> None:
    first = call("add", a=2, b=3)
    one = both(first + call("add", a=4, b=5), "Five.")
    asked = {"max_output_tokens": len(first) + 30}
    assert [item["status"] for item in one.ask(**asked)["output"][1:]] == ["incomplete", "incomplete"]
    done = [event["item"] for event in one.stream(**asked) if event["type"] == "response.output_item.done"]
    assert [(item["type"], item.get("status")) for item in done[1:]] == [("mcp_call", "incomplete")] * 2


@pytest.mark.parametrize(("stop", "arguments"), [('{"a"', ""), (', "b"', '{"a": 2')])
def test_a_call_that_a_stop_string_cuts_is_not_made(both: Start, stop: str, arguments: str) -> None:
    """An earlier version made a call without arguments if the stop string came before them."""
    spec = ModelSpec("null", "null", tool_parser="hermes", defaults=Defaults(stop=(stop,)))
    one = both(call("echo") + call("add", a=2, b=3), "Five.", initial=(spec,))
    events = one.stream()
    for made in (one.ask(), events[-1]["response"]):
        found = [(item["name"], item["arguments"], item["status"], item["output"]) for item in made["output"][1:]]
        assert found == [("echo", "{}", "incomplete", None), ("add", arguments, "incomplete", None)]
        assert made["status"] == "completed"
    assert len(one.prompts) == 2, "no turn follows"


@pytest.mark.parametrize("approval", ["never", "always"])
@pytest.mark.parametrize(
    ("form", "turn"),
    [
        ("hermes", "Let me add:\n```\n" + call("add", a=2, b=3)),
        ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}<|call|>'),
    ],
)
def test_a_call_that_a_stop_string_cuts_before_its_arguments_is_no_call_without_arguments(
    both: Start, form: str, turn: str, approval: str
) -> None:
    """Earlier versions made such a call if a fence came before it, or if the model writes channels."""
    spec = ModelSpec("null", "null", tool_parser=form, defaults=Defaults(stop=('{"a"',)))
    one = both(turn, "Five.", initial=(spec,))
    made = one.ask(offer={"require_approval": approval})
    last = made["output"][-1]
    assert (last["type"], last["name"], last["arguments"], last["status"]) == ("mcp_call", "add", "", "incomplete")
    assert len(one.prompts) == 1, "no turn follows"


@pytest.mark.parametrize("limit", [{}, {"max_output_tokens": len(call("add", a=2, b=3)) - 20}])
def test_the_user_is_not_asked_to_approve_a_call_that_was_cut(both: Start, limit: dict[str, Any]) -> None:
    spec = ModelSpec("null", "null", tool_parser="hermes", defaults=Defaults() if limit else Defaults(stop=(', "b"',)))
    one = both(call("add", a=2, b=3), "Five.", initial=(spec,))
    asked: dict[str, Any] = {"offer": {"require_approval": "always"}, **limit}
    events = one.stream(**asked)
    for made in (one.ask(**asked), events[-1]["response"]):
        assert [(item["type"], item.get("status")) for item in made["output"][1:]] == [("mcp_call", "incomplete")]
    added, done = ([event["item"] for event in events if event["type"] == f"response.output_item.{kind}"][-1] for kind in ("added", "done"))
    assert (added["id"], added["status"], added["arguments"]) == (done["id"], "in_progress", "") and done == events[-1]["response"][
        "output"
    ][-1]


def test_the_events_are_numbered_without_a_gap_if_the_worker_fails_within_a_call_to_approve(both: Start) -> None:
    one = both(call("add", a=2, b=3))
    one.server.worker.script.fail_after = 40
    *_, last = one.stream(offer={"require_approval": "always"})
    assert last["type"] == "response.failed"
    assert [(item["type"], item.get("status")) for item in last["response"]["output"][1:]] == [("mcp_call", "incomplete")]


@pytest.mark.parametrize(
    ("name", "told"), [("rubbish", "expected JSON|not JSON"), ("ask", "asks for elicitation"), ("large", "more than 4 MiB")]
)
def test_a_bad_server_costs_one_call(both: Start, name: str, told: str) -> None:
    made = both(call(name), "Sorry.").ask()
    (failed,) = [item for item in made["output"] if item["type"] == "mcp_call"]
    assert failed["status"] == "failed" and made["status"] == "completed"
    assert re.search(told, json.dumps(failed["error"]))


def test_a_server_that_is_not_there_is_named(both: Start) -> None:
    one = both("Sorry.", mcp_servers=("math=http://127.0.0.1:1/mcp",))
    made = one.ask()
    assert kinds(made) == ["mcp_list_tools", "message"] and "cannot be reached" in made["output"][0]["error"]
    events = one.stream()
    assert "response.mcp_list_tools.failed" in [event["type"] for event in events]


def test_a_slow_server_delays_nobody_and_its_time_is_limited(both: Start) -> None:
    one = both(call("wait"), "Sorry.", mcp_timeout_s=2.0)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(one.ask()))
    asking.start()
    assert one.behaviour.waiting.wait(60)
    others = one.server.http()
    assert others.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "<|tool|>"}]}).status_code == 200
    assert not found  # the other request was answered while the call ran
    asking.join(30)
    fault = found[0]["output"][1]["error"]
    assert (fault["type"], fault["code"]) == ("http_error", 504) and "did not answer within 2 s" in fault["message"]


def test_a_client_that_leaves_ends_the_call(both: Start) -> None:
    # a server of this version is told of the end
    one = both(call("wait"), "Late.", behaviour=Behaviour("legacy"))
    with one.http.stream("POST", "/v1/responses", json=body_of(stream=True)) as response:
        lines = response.iter_lines()
        assert any("mcp_call.in_progress" in line for line in lines)
        assert one.behaviour.waiting.wait(60)
    assert one.behaviour.cancelled.wait(60)
    assert len(one.server.worker.submits) == 1


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "input": "hi", "tools": [{"type": "mcp", "server_label": "math", "require_approval": "never"}], **fields}


def test_a_background_response_can_be_cancelled_during_a_call(both: Start) -> None:
    one = both(call("wait"), "Late.")
    made = one.ask(background=True)
    assert one.behaviour.waiting.wait(60)
    cancelled = one.http.post(f"/v1/responses/{made['id']}/cancel").json()
    require_valid(validator(RESPONSES, WHOLE), cancelled, None)
    assert cancelled["status"] == "cancelled" and cancelled["output"][1]["status"] == "incomplete"


def test_a_background_response_with_calls_sees_images(both: Start) -> None:
    """Each turn decodes the images, also after the request was answered."""
    one = both(call("add", a=2, b=3), "Five.", vision=Vision(16, edge_tokens=1, image_token=256, fit=Tiles(longest_edge=32), filter=1))
    seen = {"type": "input_image", "image_url": data_url(encoded(image())), "detail": "auto"}
    made = one.ask(background=True, input=[{"role": "user", "content": [seen, {"type": "input_text", "text": "What is it?"}]}])
    for _ in range(2000):
        if made["status"] not in ("queued", "in_progress"):
            break
        time.sleep(0.01)
        made = one.http.get(f"/v1/responses/{made['id']}").json()
    assert (made["status"], made["error"]) == ("completed", None)
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "message"]


def test_secrets_reach_the_server_and_nobody_else(both: Start, caplog: pytest.LogCaptureFixture) -> None:
    one = both(call("add", a=1, b=1), "Two.")
    with caplog.at_level("DEBUG"):
        made = one.ask(offer={"authorization": "s3cret", "headers": {"X-Key": "hush"}, "server_url": one.url})
    assert one.behaviour.headers[-1]["authorization"] == "Bearer s3cret" and one.behaviour.headers[-1]["x-key"] == "hush"
    shown = json.dumps([made, one.http.get(f"/v1/responses/{made['id']}").json()]) + caplog.text
    assert "s3cret" not in shown and "hush" not in shown


@pytest.mark.parametrize(
    ("offer", "param"),
    [
        ({"server_url": "http://169.254.169.254/latest"}, "tools[0].server_url"),
        ({"server_label": "other"}, "tools[0].server_label"),
        ({"connector_id": "connector_gmail"}, "tools[0]"),
        ({"headers": {"a b": "c"}}, "tools[0].headers"),
        ({"headers": {"a": "c\r\nd: e"}}, "tools[0].headers"),
    ],
)
def test_requests_for_other_servers_are_refused(both: Start, offer: dict[str, Any], param: str) -> None:
    response = both("Fine.").post(offer=offer)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_no_server_may_be_called_by_default(both: Start) -> None:
    response = both("Fine.", mcp_servers=()).post()
    assert response.status_code == 400 and "mcp_servers" in response.json()["error"]["message"]


def test_one_label_stands_for_one_server(both: Start) -> None:
    second = {"type": "mcp", "server_label": "math"}
    assert both("Fine.").post(tools=(second,)).json()["error"]["param"] == "tools[1].server_label"


@pytest.mark.parametrize(
    "entry", ["math", "=http://a", "a=ftp://b", "a=http://", "a=http://user:pass@host/", "a=http://b/ c", "a b=http://c"]
)
def test_entries_are_checked_at_the_start(entry: str) -> None:
    with pytest.raises(SettingsError, match="mcp_servers has"):
        ServerSettings(mcp_servers=(entry,))
