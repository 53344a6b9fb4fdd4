"""Defaults of a model apply to the fields that a request leaves out, on every API that generates."""

from __future__ import annotations

import json
import threading
import time

import pytest

from server.defaults import Defaults
from server.models.state import ModelSpec, SavedState, write_state
from server.text.templates.errors import TemplateUnavailable
from tests.doubles.worker import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]
SET = Defaults(system="Be brief.", temperature=0.25, top_k=7, presence_penalty=0.5, stop=("END",), max_tokens=9)
# how each API asks, and how it sets its own temperature, stop strings and number of tokens
APIS = {
    "/v1/chat/completions": ({"messages": HI}, {"temperature": 0.5, "stop": ["X"], "max_tokens": 3}),
    "/v1/completions": ({"prompt": "hi"}, {"temperature": 0.5, "stop": ["X"], "max_tokens": 3}),
    "/v1/responses": ({"input": "hi"}, {"temperature": 0.5, "max_output_tokens": 3}),
    "/v1/messages": ({"messages": HI, "max_tokens": 5}, {"temperature": 0.5, "stop_sequences": ["X"], "max_tokens": 3}),
    "/api/chat": ({"messages": HI, "stream": False}, {"options": {"temperature": 0.5, "stop": ["X"], "num_predict": 3}}),
    "/api/generate": ({"prompt": "hi", "stream": False}, {"options": {"temperature": 0.5, "stop": ["X"], "num_predict": 3}}),
    "/completion": ({"prompt": "hi"}, {"temperature": 0.5, "stop": ["X"], "n_predict": 3}),
}
CONVERSATIONS = [path for path in APIS if path not in ("/v1/completions", "/completion")]


@pytest.fixture
def server(serve):
    return serve(initial=(ModelSpec("null", "null", defaults=SET),), admin_keys=())


def asked(server, path, **body):
    answer = server.http().post(path, json={"model": "null", **APIS[path][0], **body})
    assert answer.status_code == 200, answer.text
    submit = server.worker.submits[-1]
    return submit, bytes(token for token in submit.prompt_ids if token < 256).decode()


@pytest.mark.parametrize("path", APIS)
def test_each_api_uses_them(server, path):
    submit, prompt = asked(server, path)
    params = submit.params
    assert (params.temperature, params.top_k, params.presence_penalty) == (0.25, 7, 0.5)
    assert params.max_tokens == (5 if path == "/v1/messages" else 9)
    assert ("<|system|>Be brief." in prompt) == (path in CONVERSATIONS)


@pytest.mark.parametrize("path", APIS)
def test_the_requests_own_values_win(server, path):
    submit, _ = asked(server, path, **APIS[path][1])
    assert (submit.params.temperature, submit.params.top_k, submit.params.max_tokens) == (0.5, 7, 3)


@pytest.mark.parametrize("path", APIS)
def test_a_request_may_ask_for_more_tokens_than_the_default(server, path):
    own = json.loads(json.dumps(APIS[path][1]).replace("3", "30"))
    submit, _ = asked(server, path, **own)
    assert submit.params.max_tokens == 30


def test_a_default_stop_string_ends_an_answer(serve, answering):
    server = serve(script=answering("oneENDtwoXthree"), initial=(ModelSpec("null", "null", defaults=Defaults(stop=("END",))),))
    said = [server.chat(model="null", **own).json()["choices"][0]["message"]["content"] for own in ({}, {"stop": "X"}, {"stop": []})]
    assert said == ["one", "oneENDtwo", "oneENDtwoXthree"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_of_the_request_wins(server, role):
    _, prompt = asked(server, "/v1/chat/completions", messages=[{"role": role, "content": "Be long."}, *HI])
    assert "Be long." in prompt and "Be brief." not in prompt


def test_counted_and_shown_prompts_have_the_system_message(server):
    http = server.http()
    for path, body in (("/tokenize", {"messages": HI}), ("/v1/chat/completions/render", {"messages": HI})):
        found = http.post(path, json={"model": "null", **body}).json()
        ids = found.get("tokens") or found["token_ids"]
        assert "Be brief." in bytes(token for token in ids if token < 256).decode()
    assert "Be brief." in http.post("/apply-template", json={"messages": HI}).json()["prompt"]


def test_a_template_without_system_messages_gets_the_text_in_the_first_message(serve):
    class NoSystem(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            assert self.chat_template is not None
            render = self.chat_template.render

            def rendered(messages, tools=None, *args, **options):
                assert all(message["role"] != "system" for message in messages)
                return render(messages, None, *args, **options)

            self.chat_template.render = rendered  # type: ignore[method-assign]

    server = serve(tokenizer=NoSystem(), initial=(ModelSpec("null", "null", defaults=SET),))
    _, prompt = asked(server, "/v1/chat/completions")
    assert "<|user|>Be brief.\n\nhi" in prompt


@pytest.mark.parametrize(
    "own", [{"enable_thinking": True}, {"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
def test_thoughts_of_the_request_win(serve, own):
    seen = []

    class Thinker(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            assert self.chat_template is not None
            render = self.chat_template.render

            def rendered(*args, variables=None, **options):
                seen.append(variables or {})
                return render(*args, variables=variables, **options)

            self.chat_template.render = rendered  # type: ignore[method-assign]

    server = serve(tokenizer=Thinker(), initial=(ModelSpec("null", "null", defaults=Defaults(reasoning_effort="none")),))
    asked(server, "/v1/chat/completions")
    assert seen[-1]["enable_thinking"] is False and seen[-1]["reasoning_effort"] == "none"
    asked(server, "/v1/chat/completions", **own)
    assert seen[-1]["enable_thinking"] is True


def test_they_are_shown(server):
    http = server.http()
    entry = http.get("/v1/models/null").json()
    assert entry["sampling"]["temperature"] == 0.25 and entry["sampling"]["presence_penalty"] == 0.5
    assert entry["defaults"] == {"system": "Be brief.", "stop": ["END"], "max_tokens": 9}
    shown = http.post("/api/show", json={"model": "null"}).json()
    assert shown["system"] == "Be brief."
    assert [line.split() for line in shown["parameters"].splitlines()] == [
        ["temperature", "0.25"],
        ["top_k", "7"],
        ["presence_penalty", "0.5"],
        ["num_predict", "9"],
        ["stop", '"END"'],
    ]
    assert 'SYSTEM """Be brief."""' in shown["modelfile"] and 'PARAMETER stop "END"' in shown["modelfile"]
    assert http.get("/props").json()["default_generation_settings"]["params"]["n_predict"] == 9


def test_they_are_part_of_the_fingerprint(serve):
    """A gateway continues an answer on another replica only if its bytes are the same."""
    found = []
    for defaults in (Defaults(), SET):
        server = serve(initial=(ModelSpec("null", "null", defaults=defaults),))
        found.append(server.chat().json()["system_fingerprint"])
    assert found[0] != found[1]
    assert serve(initial=(ModelSpec("null", "null", defaults=SET),)).chat().json()["system_fingerprint"] == found[1]


def test_a_load_sets_them(serve, tmp_path):
    server = serve(initial=())
    (tmp_path / "models" / "one").mkdir()
    http = server.http()
    body = {"source": "one", "name": "null", "wait": True, "defaults": {"temperature": 0.25, "stop": "END"}}
    loaded = http.post("/admin/models", json=body).json()["result"]
    assert loaded["sampling"]["temperature"] == 0.25 and loaded["defaults"] == {"stop": ["END"]}
    for defaults, message in (({"temprature": 1}, "is temperature meant"), ({"top_p": 2}, "top_p in defaults is 2")):
        refused = http.post("/admin/models", json={"source": "one", "name": "two", "defaults": defaults})
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]


# --- models that Ollama's clients create ---------------------------------------------------------------------------------------


def created(server, **body):
    return server.http().post("/api/create", json={"model": "pirate", "from": "null", "stream": False, **body})


def test_a_created_model_has_its_own_defaults(server):
    made = created(server, system="Speak like a pirate.", parameters={"temperature": 0.75, "stop": ["Arr"], "num_ctx": 2048})
    assert made.json() == {"status": "success"} and made.headers["x-ignored-params"] == "parameters.num_ctx"
    http = server.http()
    http.post("/v1/chat/completions", json={"model": "pirate:latest", "messages": HI})
    submit = server.worker.submits[-1]
    assert submit.params.temperature == 0.75 and submit.params.top_k == 7
    assert b"Speak like a pirate." in bytes(token for token in submit.prompt_ids if token < 256)
    _, prompt = asked(server, "/v1/chat/completions")  # the model itself stays as it was
    assert "Be brief." in prompt and server.worker.submits[-1].params.temperature == 0.25
    shown = http.post("/api/show", json={"model": "pirate"}).json()
    assert shown["system"] == "Speak like a pirate." and "num_predict" in shown["parameters"]
    assert {entry["name"] for entry in http.get("/api/tags").json()["models"]} == {"null", "pirate"}
    listed = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert listed["pirate"]["root"] == "null" and listed["pirate"]["sampling"]["temperature"] == 0.75
    assert http.get("/v1/models/pirate").json()["defaults"]["system"] == "Speak like a pirate."


def test_a_created_model_can_be_copied_created_from_and_deleted(server):
    created(server, system="Speak like a pirate.")
    http = server.http()
    assert http.post("/api/copy", json={"source": "pirate", "destination": "corsair"}).status_code == 200
    assert created(server, model="calm", **{"from": "pirate"}, parameters={"temperature": 0}).status_code == 200
    for name in ("corsair", "calm"):
        assert http.post("/api/show", json={"model": name}).json()["system"] == "Speak like a pirate."
    assert http.request("DELETE", "/api/delete", json={"model": "pirate"}).status_code == 200
    assert http.post("/api/show", json={"model": "pirate"}).status_code == 404
    assert created(server, model="corsair").status_code == 200  # an alias without defaults of its own again
    assert http.post("/api/show", json={"model": "corsair"}).json()["system"] == "Be brief."


def test_a_model_whose_name_has_the_tag_of_ollama_has_no_defaults_of_a_created_one(serve):
    server = serve(initial=(ModelSpec("null:latest", "null"),))
    http = server.http()
    body = {"model": "null", "from": "null:latest", "system": "Speak like a pirate.", "stream": False}
    assert http.post("/api/create", json=body).status_code == 200
    assert http.post("/api/copy", json={"source": "null:latest", "destination": "plain"}).status_code == 200
    for name, system in (("null", "Speak like a pirate."), ("null:latest", None), ("plain", None)):
        assert http.post("/api/show", json={"model": name}).json().get("system") == system, name


def test_a_restart_keeps_created_models(serve, tmp_path):
    state = tmp_path / "state.json"
    server = serve(initial=(ModelSpec("null", "null", defaults=SET),), state_file=state)
    created(server, system="Speak like a pirate.", template="{{ messages }}")
    server.stop()
    again = serve(initial=(), state_file=state)
    shown = again.http().post("/api/show", json={"model": "pirate"}).json()
    assert shown["system"] == "Speak like a pirate." and shown["template"] == "{{ messages }}"
    assert again.http().get("/v1/models/null").json()["defaults"]["system"] == "Be brief."


def test_a_restart_with_the_same_command_line_keeps_created_models(serve, tmp_path):
    """The command line decides the settings of its models; names that they have got since come from the state file."""
    state, initial = tmp_path / "state.json", (ModelSpec("null", "null", aliases=("friend",)), ModelSpec("other", "null"))
    server = serve(initial=initial, state_file=state)
    created(server, system="Speak like a pirate.")
    for alias, model in (("mate", "null"), ("moved", "null"), ("moved", "other")):
        assert server.http().put(f"/admin/aliases/{alias}", json={"model": model}).status_code == 200
    server.stop()
    again = serve(initial=initial, state_file=state)
    assert again.http().get("/admin/aliases").json() == {"friend": "null", "mate": "null", "moved": "other", "pirate": "null"}
    assert again.http().post("/api/show", json={"model": "pirate"}).json()["system"] == "Speak like a pirate."
    again.stop()
    taken = (ModelSpec("null", "null"), ModelSpec("other", "null", aliases=("pirate",)), ModelSpec("mate", "null"))
    names = serve(initial=taken, state_file=state).http().get("/admin/aliases").json()
    assert names == {"friend": "null", "moved": "other", "pirate": "other"}, "the command line wins"


def test_a_name_that_now_is_an_alias_of_another_model_brings_no_names(serve, tmp_path):
    """The saved model called `null` is another one than the model of which `null` is now an alias."""
    state = tmp_path / "state.json"
    write_state(state, SavedState((ModelSpec("null", "elsewhere", aliases=("mate",)),)))
    server = serve(initial=(ModelSpec("other", "here", aliases=("null",)),), state_file=state)
    assert server.http().get("/admin/aliases").json() == {"null": "other"}


@pytest.mark.parametrize("slow", ["null", "other"])
def test_a_name_of_the_command_line_stays_there(serve, answering, tmp_path, slow):
    """A saved model loses it, whichever of the two models is loaded first."""
    state = tmp_path / "state.json"
    write_state(state, SavedState((ModelSpec("other", "other", aliases=("live", "mate")),)))
    scripts = {slow: answering("", load_s=0.3)}
    initial = (ModelSpec("null", "null", aliases=("live",)),)
    server = serve(initial=initial, state_file=state, scripts=scripts, is_cached=lambda _: True)  # so they load at the same time
    while not all(model.loaded for model in server.registry.models()):
        time.sleep(0.005)
    assert server.http().get("/admin/aliases").json() == {"live": "null", "mate": "other"}


def test_a_new_version_of_the_files_keeps_created_models(serve):
    version = ["1"]
    server = serve(identify=lambda _source: version[0], initial=(), model_root="/")
    spec = {"source": "usr", "name": "null", "wait": True}
    http = server.http()
    http.post("/admin/models", json=spec)
    created(server, system="Speak like a pirate.")
    version[0] = "2"
    assert http.post("/admin/models", json=spec).json()["kind"] == "reload"
    assert http.post("/api/show", json={"model": "pirate"}).json()["system"] == "Speak like a pirate."


def test_a_reload_leaves_running_requests_of_created_models_alone(serve, answering):
    """A request under the name of a created model finishes on the old worker, like one under the name of the model itself."""
    version = ["1"]
    scripts = {"null": answering("old " * 20, interval_s=0.02)}
    server = serve(identify=lambda _source: version[0], initial=(), model_root="/", scripts=scripts)
    spec = {"source": "usr", "name": "null", "wait": True}
    http = server.http()
    http.post("/admin/models", json=spec)
    created(server, system="Speak like a pirate.")
    old = server.workers["null"]
    version[0] = "2"
    server.scripts["null"] = answering("new")
    stop, cut_off, got = old.stop, [], {}

    async def stopped() -> None:
        cut_off.extend(old.running)
        await stop()

    old.stop = stopped
    asking = threading.Thread(target=lambda: got.update(answer=server.chat(model="pirate")))
    asking.start()
    while not old.running:
        time.sleep(0.002)
    assert http.post("/admin/models", json=spec).json()["kind"] == "reload"
    asking.join(60)
    assert got["answer"].json()["choices"][0]["message"]["content"] == "old " * 20
    while old.state != "stopped":
        time.sleep(0.002)
    assert cut_off == [], "the worker was stopped while it answered"


def test_a_load_that_cannot_make_a_created_model_stops_its_worker(serve, tmp_path):
    state = tmp_path / "state.json"
    spec = ModelSpec("null", "null", aliases=("pirate",), presets={"pirate": Defaults(template="{{ messages")})
    write_state(state, SavedState((spec,)))
    server = serve(initial=(), state_file=state)
    (operation,) = server.registry.failed()
    assert operation.error is not None and operation.error.message.startswith("the template among the defaults is broken")
    assert server.workers["null"].state == "stopped"


def test_a_model_that_is_created_during_a_reload_keeps_its_defaults(serve):
    class Slow(ByteTokenizer):
        begun, may_end = threading.Event(), threading.Event()

        def with_template(self, source: str) -> Slow:
            self.begun.set()
            assert self.may_end.wait(60)
            return super().with_template(source)

    version, spec = ["1"], {"source": "usr", "name": "null"}
    server = serve(identify=lambda _source: version[0], initial=(), model_root="/", tokenizer=Slow())
    http = server.http()
    http.post("/admin/models", json={**spec, "wait": True})
    Slow.may_end.set()
    created(server, template="{{ messages }}")
    Slow.begun.clear()
    Slow.may_end.clear()
    version[0] = "2"
    http.post("/admin/models", json=spec)
    assert Slow.begun.wait(60)
    created(server, model="calm", system="Be calm.")
    Slow.may_end.set()
    assert http.post("/admin/models", json={**spec, "wait": True}).json()["kind"] == "reload"
    assert http.post("/api/show", json={"model": "calm"}).json()["system"] == "Be calm."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"parameters": {"temperature": 101}}, "temperature in parameters is 101"),
        ({"parameters": {"mirostat": 1}}, "parameters has 'mirostat'; expected temperature"),
        ({"parameters": {"num_ctx": 1 << 20}}, "parameters.num_ctx is 1048576, and the model is loaded for 4096 tokens"),
        ({"template": "{{ .Prompt"}, "the template among the defaults is broken"),
        ({"from": "nobody"}, "model 'nobody' is not loaded"),
    ],
)
def test_what_a_model_cannot_have_is_refused(server, body, message):
    refused = created(server, **body)
    assert refused.status_code in (400, 404) and refused.json()["error"].startswith(message)
    assert server.http().post("/api/show", json={"model": "pirate"}).status_code == 404


@pytest.mark.parametrize("way", ["create", "copy", "alias"])
def test_a_template_that_a_busy_server_cannot_render_makes_no_alias_for_now(serve, way):
    """It says nothing of the template, so the client may try again."""

    class Busy(ByteTokenizer):
        is_busy = False

        def with_template(self, source: str) -> Busy:
            if self.is_busy:
                raise TemplateUnavailable("the server is busy; try again later")
            super().with_template(source)
            return self

    server = serve(tokenizer=Busy())
    http = server.http()
    created(server, template="{{ messages }}")
    Busy.is_busy = True
    if way == "create":
        answer = created(server, model="other", template="{{ messages }}")
    elif way == "copy":
        answer = http.post("/api/copy", json={"source": "pirate", "destination": "other"})
    else:
        answer = http.put("/admin/aliases/other", json={"model": "pirate"})
    error = answer.json()
    assert (answer.status_code, error.get("code") or error["error"]["code"]) == (503, "template_not_rendered"), answer.text
    assert "try again later" in answer.text and "other" not in http.get("/admin/aliases").json()


def test_an_alias_that_moves_has_the_defaults_of_its_model(serve):
    server = serve(initial=(ModelSpec("null", "null", defaults=SET), ModelSpec("two", "two")))
    created(server, system="Speak like a pirate.")
    http = server.http()
    http.put("/admin/aliases/pirate", json={"model": "two"})
    shown = http.post("/api/show", json={"model": "pirate"}).json()
    assert "system" not in shown and [one["name"] for one in http.get("/api/tags").json()["models"]] == ["null", "two", "pirate"]
