"""Pulling and deleting models through Ollama's API, used through its official client."""

from __future__ import annotations

import time

import msgspec
import pytest

from server.interfaces import LoadError
from server.messages import ErrorCode
from server.models.state import ModelSpec, SavedState
from tests.doubles.library import Shelf

ollama = pytest.importorskip("ollama")

HI = [{"role": "user", "content": "hi"}]
GGUF = "org/name-GGUF:q4_k_m"


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def server(serve, shelf):
    return serve(library=shelf, allow_hub=True, initial=())


@pytest.fixture
def client(server):
    made = ollama.Client(host=server.url)
    yield made
    made._client.close()


@pytest.mark.parametrize("name", ["org/name", GGUF, f"hf.co/{GGUF}", "org/name:latest"])
def test_a_model_comes_is_asked_and_goes(server, client, shelf, name):
    lines = list(client.pull(name, stream=True))
    assert lines[0].status == "pulling manifest" and lines[-1].status == "success"
    assert [(line.total, line.completed) for line in lines if line.digest] == [(300, 0), (300, 100), (300, 200), (300, 300)]
    plain = name.removeprefix("hf.co/").removesuffix(":latest")
    assert shelf.held == {plain} and [model.model for model in client.list().models] == [plain]
    assert client.chat(model=plain, messages=HI).message.content
    client.pull(name)
    client.delete(name)
    assert not shelf.held and not client.list().models
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete(name)
    assert caught.value.status_code == 404


def test_whole_answer(client):
    assert client.pull("org/name").status == "success"


def test_a_failed_download_is_told_and_nothing_is_left(client, shelf):
    shelf.error = LoadError(ErrorCode.FETCH_FAILED, "no route to the hub")
    with pytest.raises(ollama.ResponseError, match="no route to the hub"):
        list(client.pull("org/name", stream=True))
    with pytest.raises(ollama.ResponseError, match="no route to the hub") as caught:
        client.pull("org/name")
    assert caught.value.status_code == 502 and not client.list().models and shelf.num_open == 0


def test_a_failed_load_is_told(server, client):
    server.scripts["org/name"] = type(server.script)(load_error=LoadError(ErrorCode.LOAD_REFUSED, "no such family"))
    with pytest.raises(ollama.ResponseError, match="no such family"):
        list(client.pull("org/name", stream=True))


def test_a_name_of_the_catalogue_comes_and_goes(server, client, shelf):
    assert client.pull("known").status == "success" and shelf.held == {"known"}
    assert client.delete("known") and not shelf.held
    with pytest.raises(
        ollama.ResponseError, match="'unknown' does not exist below the model root, and cannot be downloaded; expected a name of"
    ):
        client.pull("unknown")


def test_a_whole_name_wins_over_one_without_its_tag(server, client, shelf):
    for name in ("known", "org/name"):
        client.pull(name)
    assert server.http().put("/admin/aliases/known:latest", json={"model": "org/name"}).status_code == 200
    client.delete("known:latest")
    assert shelf.held == {"known", "org/name"} and not server.registry.aliases()
    client.delete("known:latest")
    assert shelf.held == {"org/name"}


def test_a_deleted_model_whose_load_failed_does_not_come_back(serve, shelf, answering, tmp_path):
    state = tmp_path / "models.json"
    state.write_bytes(msgspec.json.encode(SavedState((ModelSpec("org/name", "org/name"),))))
    broken = answering("", load_error=LoadError(ErrorCode.LOAD_REFUSED, "no such family"))
    server = serve(library=shelf, allow_hub=True, initial=(), state_file=state, scripts={"org/name": broken})
    shelf.held.add("org/name")
    assert server.http().request("DELETE", "/api/delete", json={"model": "org/name"}).status_code == 200
    assert not shelf.held and msgspec.json.decode(state.read_bytes(), type=SavedState).models == ()


def test_a_client_that_leaves_ends_the_download(server, shelf):
    shelf.pause_s = 0.2
    with server.http().stream("POST", "/api/pull", json={"model": "org/name"}) as stream:
        next(stream.iter_lines())
    end_s = time.monotonic() + 60
    while shelf.num_open and time.monotonic() < end_s:
        time.sleep(0.01)
    assert shelf.num_open == 0 and not shelf.held


def test_a_folder_below_the_root_is_loaded_and_never_deleted(server, client, shelf):
    (server.settings.model_root / "mine").mkdir()
    assert client.pull("mine").status == "success" and not shelf.held
    with pytest.raises(ollama.ResponseError, match="was not downloaded by relaxserve"):
        client.delete("mine")
    assert [model.model for model in client.list().models] == ["mine"] and (server.settings.model_root / "mine").exists()


def test_without_the_hub_nothing_is_fetched(serve, shelf):
    http = serve(library=shelf, initial=()).http()
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        answer = http.request(method, path, json={"model": "org/name"})
        assert answer.status_code == 400 and "start it with --allow-hub" in answer.json()["error"]
    assert not shelf.held


@pytest.mark.parametrize("allow_hub", [False, True])
def test_a_model_that_does_not_exist_is_not_found(serve, shelf, allow_hub):
    """Ollama answers 404, by which clients tell that there is nothing to delete."""
    answer = serve(library=shelf, initial=(), allow_hub=allow_hub).http().request("DELETE", "/api/delete", json={"model": "nobody"})
    assert answer.status_code == 404
    assert answer.json() == {"error": "model 'nobody' is not on this machine", "code": "model_not_found", "param": "model"}


def test_they_belong_to_the_administration(serve, shelf):
    http = serve(library=shelf, allow_hub=True, initial=(), api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"]).http()
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete"), ("POST", "/api/copy"), ("POST", "/api/create")):
        answer = http.request(method, path, json={"model": "org/name"}, headers={"authorization": "Bearer a-key-of-a-client"})
        assert answer.status_code == 403
    answer = http.post("/api/pull", json={"model": "org/name", "stream": False}, headers={"authorization": "Bearer a-key-of-an-admin"})
    assert answer.json() == {"status": "success"}


def test_a_copy_is_a_further_name(server, client, shelf):
    """A copy is an alias: deleting it deletes no model."""
    client.pull("org/name")
    client.copy("org/name", "mine:latest")
    assert client.create(model="other", from_="mine").status == "success"
    assert {"org/name", "mine", "other"} <= {one.model for one in client.list().models}
    assert len([one for one in client.ps().models if one.model in ("org/name", "mine", "other")]) == 1, "one model is in memory"
    for name in ("mine", "mine:latest", "other"):
        assert client.chat(model=name, messages=HI).message.content
    client.delete("mine")
    with pytest.raises(ollama.ResponseError, match="model 'mine' is not loaded"):
        client.chat(model="mine", messages=HI)
    assert shelf.held == {"org/name"} and client.chat(model="other", messages=HI).done
    with pytest.raises(ollama.ResponseError, match="model 'nobody' is not loaded"):
        client.copy("nobody", "x")
    with pytest.raises(ollama.ResponseError, match="alias 'org/name' is the name of a model"):
        client.copy("org/name", "org/name")


def test_unknown_fields_are_named(server, client):
    client.pull("org/name")
    copied = server.http().post("/api/copy", json={"source": "org/name", "destination": "mine", "typo": 1})
    assert copied.status_code == 200 and copied.headers["x-ignored-params"] == "typo"
    for name in ("mine", "org/name"):
        deleted = server.http().request("DELETE", "/api/delete", json={"model": name, "typo": 1})
        assert deleted.status_code == 200 and deleted.headers["x-ignored-params"] == "typo"


@pytest.mark.parametrize("field", ["quantize", "files", "adapters", "messages", "license"])
def test_a_model_is_not_changed(server, client, field):
    client.pull("org/name")
    body = {"model": "other", "from": "org/name", field: {"a": 1} if field in ("files", "adapters") else "x"}
    answer = server.http().post("/api/create", json=body)
    assert answer.status_code == 400 and answer.json()["error"].startswith(f"{field} is not supported: a created model has the weights")
    assert server.http().post("/api/create", json={"model": "other"}).status_code == 400


def test_a_served_name_is_here(serve):
    """Programs pull their model before they ask it. Without a hub, an alias is all that the name can mean."""
    server = serve(initial=(ModelSpec("null", "null", aliases=("llama3.2",)),))
    client = ollama.Client(host=server.url)
    for name in ("llama3.2", "llama3.2:latest", "null"):
        assert [line.status for line in client.pull(name, stream=True)] == ["pulling manifest", "success"]
        assert client.pull(name).status == "success"
    with pytest.raises(ollama.ResponseError, match="nosuch"):
        client.pull("nosuch")
    client._client.close()
