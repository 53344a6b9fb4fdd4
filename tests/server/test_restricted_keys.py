"""A key that may use some models only learns of no others, on any path; and a key with rates is refused as the vendors do."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fastapi.routing import APIRoute

from server import api
from server.app import create_app
from server.http.auth import Access, access_of
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings
from tests.server.test_batches import begin, chat_line, ended, lines_of

ALICE, BOB, ADMIN = "alice-0123456789", "bob-0123456789", "admin-0123456789"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
# a request to each path that names a model
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/classify": {"input": "hi"},
    "/classify": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"], "input_type": "search_query"},
    "/invocations": {"messages": HI},
    "/completions": {"prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/apply-template": {"messages": HI},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/api/show": {},
    "/v1/chat/completions": {"messages": HI},
    "/v1/chat/completions/render": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/parse_function_call": {"text": "hi", "tools": [TOOL]},
    "/separate_reasoning": {"text": "hi"},
    "/pooling": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [104]},
    **{path: {"query": "hi", "documents": ["a"]} for path in ("/v1/reranking", "/reranking", "/v2/rerank", "/rerank", "/v1/rerank")},
    **{path: {"text_1": "hi", "text_2": "ho"} for path in ("/score", "/v1/score")},
    **{path: {"prompt": "hi"} for path in ("/v1/tokenize", "/tokenize")},
    **{path: {"tokens": [104]} for path in ("/v1/detokenize", "/detokenize")},
}
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")  # their bodies are forms
SOCKETS = {"/v1/realtime": "/v1/realtime?model={}"}
UPGRADE = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "MDEyMzQ1Njc4OWFiY2RlZg=="}
BY_QUERY = {"/props": "/props?model={}", "/slots": "/slots?model={}", **SOCKETS}
BY_PATH = {"/v1/models/{model:path}": "/v1/models/{}"}
LISTS = ("/v1/models", "/api/tags", "/api/ps", "/health", "/health/ready", "/v1/files", "/v1/batches", "/v1/messages/batches")
OTHERS = re.compile(
    r"/v1/(files|batches|messages/batches|responses).*|/(api/)?version|/load|/web/.*|/metrics|/v2/models/\{model:path\}/ready|/openapi.*"
)


@pytest.fixture
def server(serve, tmp_path):
    models = [ModelSpec(name, name, aliases=(f"{name}-alias",)) for name in ("open", "secret", "hidden")]
    keys = (f"{ALICE} model=open*", BOB)
    return serve(initial=models, api_keys=keys, admin_keys=(ADMIN,), batch_dir=tmp_path / "batches")


def client_of(server, key=ALICE):
    return server.http(headers={"authorization": f"Bearer {key}"})


def paths_of_clients() -> set[str]:
    settings = ServerSettings()
    app = create_app(settings, Registry(settings, None, None))  # type: ignore[arg-type]  # nothing is loaded
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return {route.path for route in routes if access_of(re.sub(r"[{}]", "", route.path), open_metrics=False) is Access.KEY}


def test_every_path_is_tested():
    """A new endpoint either names a model and is in a table above, or says here that it names none."""
    tested = {*BODIES, *FORMS, *BY_QUERY, *BY_PATH, *LISTS}
    assert not {path for path in paths_of_clients() if path not in tested and not OTHERS.fullmatch(path)}


def test_no_endpoint_of_clients_asks_the_registry():
    """The registry does not know the limits of keys, so endpoints for clients find models by `Context`, which knows the caller's key.
    Endpoints that serve administration, health and peers are exceptions."""
    for file in Path(api.__path__[0]).rglob("*.py"):
        if file.parts[-2] == "admin" or file.name in ("health.py", "peers.py") or file.parts[-2:] == ("ollama", "models.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("serve", "find", "models", "aliases", "aliases_of"):
                assert "registry" not in ast.unparse(node.value) or (file.name == "models.py" and node.attr == "aliases_of"), (
                    file,
                    node.lineno,
                )


def test_errors_name_as_loaded_only_models_that_are(serve, tmp_path, answering):
    (tmp_path / "models" / "open-late").mkdir(parents=True)
    keys = (f"{ALICE} model=open*", BOB)
    server = serve(scripts={"open-late": answering("", load_s=600)}, api_keys=keys, admin_keys=(ADMIN,))
    admin = client_of(server, ADMIN)
    admin.put("/admin/aliases/open", json={"model": "null"})
    loading = admin.post("/admin/models", json={"source": "open-late"}).json()
    for key, loaded in ((ALICE, "open"), (BOB, "null, open")):
        missing = client_of(server, key).post("/v1/completions", json={"model": "nobody", "prompt": "hi"}).json()["error"]
        assert missing["message"] == f"model 'nobody' is not loaded; loaded are: {loaded}"
    absent = client_of(server, BOB).post("/v1/completions", json={"prompt": "hi"}).json()["error"]
    assert absent["message"] == "model is absent, and the server has 2 models: null, open-late"
    admin.delete(f"/admin/operations/{loading['id']}")


def asked(http, path: str, model: str):
    if path in BODIES:
        return http.post(path, json={"model": model, **BODIES[path]})
    if path in FORMS:
        return http.post(path, data={"model": model}, files={"file": ("a.wav", b"RIFF")})
    return http.get({**BY_QUERY, **BY_PATH}[path].format(model), headers=UPGRADE if path in SOCKETS else {})


def test_a_model_that_the_key_may_not_use_is_not_found(server):
    http, other = client_of(server), client_of(server, BOB)
    for path in (*BODIES, *FORMS, *BY_QUERY, *BY_PATH):
        for name in ("secret", "secret-alias", "secret:latest"):
            answer = asked(http, path, name)
            assert answer.status_code == 404, (path, answer.text)
            assert "model_not_found" in answer.text and "hidden" not in answer.text, (path, answer.text)
        assert asked(other, path, "secret").status_code != 404, path
        for name in ("open", "open-alias"):
            assert asked(http, path, name).status_code != 404, path
    assert http.get("/v2/models/secret/ready").status_code == 400
    assert http.get("/v2/models/open/ready").status_code == 200
    assert "unloaded" not in http.post("/api/chat", json={"model": "secret", "keep_alive": 0}).text


def test_the_tag_of_ollama_opens_no_other_model(serve, answering):
    """A key for `m` gets `m` by the name `m:latest`, also if the server has another model of that name."""
    models = [ModelSpec(name, name) for name in ("m", "m:latest")]
    scripts = {"m": answering("open"), "m:latest": answering("secret")}
    server = serve(initial=models, scripts=scripts, api_keys=(f"{ALICE} model=m", BOB))
    said = {
        key: client_of(server, key).post("/v1/completions", json={"model": "m:latest", "prompt": "hi"}).json()["choices"][0]["text"]
        for key in (ALICE, BOB)
    }
    assert said == {ALICE: "open", BOB: "secret"}
    entry = client_of(server).get("/v1/models/m:latest").json()
    assert entry["id"] == "m"


def test_a_missing_name_stands_for_the_only_model_of_the_key(server):
    answer = client_of(server).post("/v1/chat/completions", json={"messages": HI})
    assert answer.status_code == 200 and answer.json()["model"] == "open"
    assert client_of(server, BOB).post("/v1/chat/completions", json={"messages": HI}).status_code == 400


def test_no_list_has_a_model_that_the_key_may_not_use(server):
    for http, shows in ((client_of(server), False), (client_of(server, BOB), True)):
        for path in LISTS[:3]:
            text = http.get(path).text
            assert "open" in text and ("secret" in text) is shows, path
    for path in ("/health", "/health/ready", "/v1/health"):
        assert "secret" not in server.http().get(path).text, "nobody needs a key for this path"
    refused = client_of(server).get("/metrics")
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "key_restricted"
    assert client_of(server, BOB).get("/metrics").status_code == 200


def test_a_key_for_an_alias_sees_only_the_alias(serve):
    server = serve(initial=(ModelSpec("secret", "secret", aliases=("nice",)),), api_keys=(f"{ALICE} model=nice",))
    http = client_of(server)
    (entry,) = http.get("/v1/models").json()["data"]
    assert (entry["id"], entry["root"], entry["aliases"]) == ("nice", "nice", [])
    assert [one["name"] for one in http.get("/api/tags").json()["models"]] == ["nice"]
    assert "secret" not in http.post("/api/show", json={"model": "nice"}).text
    assert http.get("/v1/models/secret").status_code == 404 and http.get("/v1/models/nice").json()["id"] == "nice"


def test_a_key_for_a_created_model_cannot_leave_its_defaults(serve):
    server = serve(initial=(ModelSpec("null", "null"),), api_keys=(f"{ALICE} model=pirate",), admin_keys=(ADMIN,))
    body = {"model": "pirate", "from": "null", "system": "Speak like a pirate."}
    assert client_of(server, ADMIN).post("/api/create", json=body).status_code == 200
    http = client_of(server)
    assert http.post("/v1/chat/completions", json={"messages": HI}).status_code == 200
    assert b"pirate" in bytes(token for token in server.worker.submits[-1].prompt_ids if token < 256)
    assert http.post("/v1/chat/completions", json={"model": "null", "messages": HI}).status_code == 404
    assert [entry["id"] for entry in http.get("/v1/models").json()["data"]] == ["pirate"]


def test_lines_of_a_batch_are_held_to_the_key(server):
    client = server.openai(api_key=ALICE)
    lines = [chat_line(1, model="open"), chat_line(2, model="secret")]
    done = ended(client, begin(client, lines))
    assert set(lines_of(client, done.output_file_id)) == {"line 1"}
    (refused,) = lines_of(client, done.error_file_id).values()
    assert refused["response"]["status_code"] == 404 and "hidden" not in str(refused)


# --- rates ---------------------------------------------------------------------------------------------------------------------


def test_openai_s_client_sees_the_rate_and_its_end(serve):
    server = serve(api_keys=(f"{ALICE} requests_per_minute=2 tokens_per_minute=1000", BOB))
    client = server.openai(api_key=ALICE)
    for left in (1, 0):
        raw = client.chat.completions.with_raw_response.create(model="null", messages=HI)
        assert raw.headers["x-ratelimit-limit-requests"] == "2" and raw.headers["x-ratelimit-remaining-requests"] == str(left)
        used = raw.parse().usage.total_tokens
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="null", messages=HI)
    error = refused.value
    assert error.code == "rate_limit_exceeded" and 1 <= int(error.response.headers["retry-after"]) <= 30
    assert int(error.response.headers["x-ratelimit-remaining-tokens"]) <= 1000 - used
    assert client.models.list().data, "only requests that may run a model count"
    others = server.openai(api_key=BOB)
    for _ in range(4):
        raw = others.chat.completions.with_raw_response.create(model="null", messages=HI)
    assert "anthropic-ratelimit-requests-limit" not in raw.headers


def test_anthropic_s_client_sees_the_rate_and_its_end(serve):
    server = serve(api_keys=(f"{ALICE} requests_per_minute=1",))
    client = anthropic.Anthropic(base_url=server.url, api_key=ALICE, max_retries=0)
    raw = client.messages.with_raw_response.create(model="null", max_tokens=4, messages=HI)
    assert raw.headers["anthropic-ratelimit-requests-limit"] == "1" and raw.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert raw.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    with pytest.raises(anthropic.RateLimitError) as refused:
        client.messages.create(model="null", max_tokens=4, messages=HI)
    assert refused.value.body["error"]["type"] == "rate_limit_error" and refused.value.response.headers["retry-after"]
    client.close()


def test_tokens_of_a_stream_are_counted(serve):
    server = serve(api_keys=(f"{ALICE} tokens_per_minute=5",))
    http = client_of(server)
    said = http.post("/v1/chat/completions", json={"model": "null", "messages": HI, "stream": True})
    assert said.status_code == 200 and said.headers["x-ratelimit-remaining-tokens"] == "5"
    refused = http.post("/v1/chat/completions", json={"model": "null", "messages": HI})
    assert refused.status_code == 429 and "5 tokens per minute" in refused.json()["error"]["message"]


def test_a_request_that_ends_early_frees_its_place(serve):
    server = serve(api_keys=(f"{ALICE} concurrent_requests=1",))
    http = client_of(server)
    for _ in range(3):
        assert http.post("/v1/chat/completions", content=b"{").status_code == 400
        assert http.post("/v1/chat/completions", json={"model": "null", "messages": HI}).status_code == 200
