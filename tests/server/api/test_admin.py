"""The admin API during the life of a model: load, progress, cancel, refuse, unload, and reload after a restart of the server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.nn import WeightFormat
from deploy.serve import load_of
from runtime.errors import RuntimeFault
from server.api.admin.endpoint import LoadBody, WeightForm
from server.errors import ApiError
from server.interfaces import CachedModel, LoadError
from server.messages import ErrorCode
from server.models.model import Footprint, FormEstimate, ModelState, Unloaded
from server.models.state import ModelSpec, SavedState, read_state, write_state
from tests.doubles.plans import EndlessPlan
from tests.doubles.worker import NullScript

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b", "c", "big"):
        (tmp_path / "models" / name).mkdir(parents=True)
    return tmp_path


def footprint(num_bytes: int) -> Footprint:
    return Footprint(weights_bytes=num_bytes, arena_bytes=0, kv_cache_bytes=0, page_bytes=4096)


def wait_for(client, operation: dict) -> dict:
    end = time.monotonic() + 60
    while operation["state"] == "running":
        assert time.monotonic() < end
        time.sleep(0.01)
        operation = client.get(f"/admin/operations/{operation['id']}").json()
    return operation


def test_load_serve_unload(serve, folder):
    server = serve(initial=())
    client = server.http()
    begun = client.post("/admin/models", json={"source": "a", "aliases": ["friend"]})
    assert begun.status_code == 202 and begun.headers["location"] == f"/admin/operations/{begun.json()['id']}"
    ended = wait_for(client, begun.json())
    assert ended["state"] == "succeeded" and ended["fraction"] == 1
    assert {"fetch", "verify", "compile", "pack", "warm-up"} <= set(ended["stages"])

    (model,) = client.get("/admin/models").json()["data"]
    assert model["id"] == "a" and model["state"] == "ready" and model["aliases"] == ["friend"]
    assert model["bytes"] == {"weights": 1 << 20, "arena": 1 << 16, "kv_cache": 1 << 20} and model["restarts"] == 0
    assert server.chat(model="friend").json()["model"] == "friend"
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["a"]
    assert client.get("/v1/models/friend").json()["max_model_len"] == 4096

    gone = client.delete("/admin/models/a", params={"drain_s": 1}).json()
    assert gone["freed_bytes"] == (2 << 20) + (1 << 16) and gone["resident_before_bytes"] > 0
    assert server.chat(model="a").status_code == 404 and server.chat(model="friend").status_code == 404
    assert client.get("/admin/memory").json()["used_bytes"] == 0


def test_waiting_for_a_load(serve, folder):
    server = serve(initial=())
    answer = server.http().post("/admin/models", json={"source": "a", "name": "x/y", "wait": True})
    assert answer.status_code == 200 and answer.json()["result"]["id"] == "x/y"
    assert server.http().get("/admin/models/x/y").json()["state"] == "ready"


def test_a_repeated_load_joins_the_running_one(serve, folder, answering):
    server = serve(script=answering("", load_s=0.5), initial=())
    client = server.http()
    first, second = (client.post("/admin/models", json={"source": "a"}).json() for _ in range(2))
    assert first["id"] == second["id"]
    assert wait_for(client, first)["state"] == "succeeded" and len(server.workers) == 1
    again = client.post("/admin/models", json={"source": "a"})
    assert again.status_code == 200 and again.json()["id"] == first["id"]
    named = client.post("/admin/models", json={"source": "a", "aliases": ["later"], "pin": True})
    assert named.status_code == 200 and server.chat(model="later").status_code == 200
    assert client.get("/admin/models/a").json()["pin"]
    other = client.post("/admin/models", json={"source": "b", "name": "a"})
    assert other.status_code == 409 and other.json()["error"]["code"] == "model_exists"


def said(server, **body) -> str:
    return server.chat(**body).json()["choices"][0]["message"]["content"]


def test_a_load_of_changed_files_replaces_the_model_and_loses_no_request(serve, folder, answering):
    """If the files of a source have changed, loading the source again replaces the model. A running request finishes on the old worker,
    which then stops; later requests use the new model."""
    states = ["one"]
    server = serve(initial=(), scripts={"a": answering("old " * 20, interval_s=0.02)}, identify=lambda _source: states[-1])
    client = server.http()
    first = client.post("/admin/models", json={"source": "a", "aliases": ["friend"], "wait": True}).json()
    old = server.workers["a"]
    assert client.post("/admin/models", json={"source": "a"}).json()["id"] == first["id"], "nothing has changed"
    states.append("two")
    server.scripts["a"] = answering("new", load_s=0.2)
    begun = client.post("/admin/models", json={"source": "a", "aliases": ["mate"]})
    assert begun.status_code == 202 and begun.json()["kind"] == "reload"
    assert client.post("/admin/models", json={"source": "a"}).json()["id"] == begun.json()["id"], "a second load joins the first"
    got = {}
    asking = threading.Thread(target=lambda: got.update(answer=said(server, model="friend")))
    asking.start()
    while not old.running:
        time.sleep(0.002)
    assert client.get("/admin/models/a").json()["state"] == "ready"
    assert wait_for(client, begun.json())["state"] == "succeeded"
    for name in ("a", "friend", "mate"):
        assert said(server, model=name) == "new"
    asking.join(60)
    assert got["answer"] == "old " * 20
    while old.state != "stopped":
        time.sleep(0.002)
    assert server.workers["a"].submits[0].request_id.startswith("probe-"), "the new model served a request before its probe"
    while client.get("/admin/memory").json()["used_bytes"] != (2 << 20) + (1 << 16):
        time.sleep(0.002)
    assert client.post("/admin/models", json={"source": "a"}).json()["id"] == begun.json()["id"], "nothing has changed since"


@pytest.mark.parametrize("fault", [{"load_error": LoadError(ErrorCode.LOAD_REFUSED, "the header is cut off")}, {"fail_after": 0}])
def test_the_old_model_stays_when_changed_files_cannot_be_served(serve, folder, answering, fault):
    states = ["one"]
    server = serve(initial=(), scripts={"a": answering("old")}, identify=lambda _source: states[-1])
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["friend"], "wait": True})
    old = server.workers["a"]
    states.append("two")
    server.scripts["a"] = answering("new", **fault)
    refused = client.post("/admin/models", json={"source": "a", "aliases": ["mate"], "wait": True})
    assert refused.json()["error"]["code"] == ("load_refused" if "load_error" in fault else "probe_failed")
    assert server.workers["a"] is not old and server.workers["a"].state == "stopped"
    assert said(server, model="friend") == "old" and server.chat(model="mate").status_code == 404
    assert client.get("/admin/memory").json()["used_bytes"] == (2 << 20) + (1 << 16)
    server.scripts["a"] = answering("new")
    assert client.post("/admin/models", json={"source": "a", "wait": True}).status_code == 200 and said(server, model="friend") == "new"


def test_changed_files_without_memory_for_both_are_refused_with_figures(serve, folder, answering):
    states = ["one"]
    server = serve(initial=(), scripts={"a": answering("old")}, identify=lambda _source: states[-1], memory_limit_bytes=3 << 20)
    client = server.http()
    client.post("/admin/models", json={"source": "a", "wait": True})
    states.append("two")
    held = (2 << 20) + (1 << 16)
    free = (3 << 20) - held
    server.scripts["a"] = answering(
        "new", load_error=LoadError(ErrorCode.INSUFFICIENT_MEMORY, f"it takes {held}, {free} are free", held, free)
    )
    error = client.post("/admin/models", json={"source": "a", "wait": True}).json()["error"]
    assert (error["code"], error["required_bytes"], error["free_bytes"]) == ("insufficient_memory", held, free)
    assert "and holds 2.1 MiB: unload 'a', then load it again" in error["message"]
    assert server.registry.budget.free_bytes == free and said(server, model="a") == "old"


@pytest.mark.parametrize("name", ["a", "a:latest"])
def test_a_replacement_is_given_up_with_its_model(name, serve, folder, answering):
    states = ["one"]
    server = serve(initial=(), scripts={"a": answering("old")}, identify=lambda _source: states[-1])
    client = server.http()
    client.post("/admin/models", json={"source": "a", "wait": True})
    states.append("two")
    server.scripts["a"] = answering("new", load_s=30)
    operation = client.post("/admin/models", json={"source": "a"}).json()
    assert client.delete(f"/admin/models/{name}").status_code == 200
    assert wait_for(client, operation)["state"] == "cancelled"
    assert client.get("/admin/models").json()["data"] == [] and server.workers["a"].state == "stopped"


def test_events_of_a_load(serve, folder, answering):
    server = serve(script=answering("", load_s=0.2), initial=())
    client = server.http()
    operation = client.post("/admin/models", json={"source": "a"}).json()
    text = client.get(f"/admin/operations/{operation['id']}/events").text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    stages = list(dict.fromkeys(event["stage"] for event in events))
    assert stages[-5:] == ["fetch", "verify", "compile", "pack", "warm-up"]
    assert events[-1]["state"] == "succeeded" and text.endswith("data: [DONE]\n\n")


def test_cancelling_a_load_leaves_nothing(serve, folder, answering):
    server = serve(script=answering("", load_s=30), initial=())
    client = server.http()
    operation = client.post("/admin/models", json={"source": "a"}).json()
    end_s = time.monotonic() + 60
    while "a" not in server.workers and time.monotonic() < end_s:
        time.sleep(0.01)
    cancelled = client.delete(f"/admin/operations/{operation['id']}").json()
    assert cancelled["state"] == "cancelled" and cancelled["error"]["code"] == "load_cancelled"
    assert client.get("/admin/models").json()["data"] == [] and server.workers["a"].state == "stopped"
    again = client.delete(f"/admin/operations/{operation['id']}")
    assert again.status_code == 409 and again.json()["error"]["code"] == "operation_ended"


def test_a_load_can_be_cancelled_before_it_does_anything(serve, folder):
    server = serve(initial=())

    async def cancel_at_once() -> str:
        operation = await server.registry.load(ModelSpec("a", "a"))
        await server.registry.cancel(operation)
        return operation.state

    assert asyncio.run_coroutine_threadsafe(cancel_at_once(), server.loop).result(60) == "cancelled"
    assert server.registry.models() == []


def test_two_models_serve_while_a_third_fails_and_leaves_no_trace(serve, folder, answering):
    broken = answering("", load_s=0.3, load_error=LoadError(ErrorCode.LOAD_REFUSED, "model.safetensors: the header is cut off"))
    server = serve(initial=(), scripts={"c": broken, "a": answering("from a"), "b": answering("from b")})
    client = server.http()
    for name in "ab":
        assert client.post("/admin/models", json={"source": name, "wait": True}).status_code == 200
    before = client.get("/admin/memory").json()
    operation = client.post("/admin/models", json={"source": "c", "aliases": ["see"]}).json()
    answers = {name: server.chat(model=name).json()["choices"][0]["message"]["content"] for name in "ab"}
    assert answers == {"a": "from a", "b": "from b"}
    failed = wait_for(client, operation)
    assert failed["state"] == "failed" and failed["error"]["code"] == "load_refused" and "header" in failed["error"]["message"]
    after = client.get("/admin/memory").json()
    assert after["models"] == before["models"] and after["used_bytes"] == before["used_bytes"]
    assert {m["id"] for m in client.get("/admin/models").json()["data"]} == {"a", "b"}
    assert server.chat(model="see").status_code == 404


def test_a_dry_run_that_does_not_fit_is_refused_with_figures(serve, folder):
    sizes = {name: footprint(GIB) for name in "abc"} | {"big": footprint(3 * GIB)}
    scripts = {name: NullScript(weights_bytes=GIB, kv_cache_bytes=0) for name in "ab"}
    server = serve(initial=(), footprints=sizes, scripts=scripts, memory_limit_bytes=3 * GIB)
    client = server.http()
    client.post("/admin/models", json={"source": "a", "wait": True})
    client.post("/admin/models", json={"source": "b", "wait": True, "pin": True})
    response = client.post("/admin/models", json={"source": "big", "dry_run": True})
    error = response.json()["error"]
    assert response.status_code == 507 and error["code"] == "insufficient_memory"
    assert error["required_bytes"] == 3 * GIB and error["free_bytes"] == GIB - (2 << 16)
    assert error["evictable"] == [{"model": "a", "bytes": GIB + (1 << 16)}]  # b is pinned
    assert set(server.workers) == {"a", "b"}, "a worker was started for a dry run"
    fits = client.post("/admin/models", json={"source": "c", "dry_run": True, "kv_cache_bytes": 5})
    assert fits.status_code == 507  # refused even with a tiny KV cache: less than 1 GiB is free, too little for the weights
    client.delete("/admin/models/a")
    assert client.post("/admin/models", json={"source": "c", "dry_run": True}).json()["required_bytes"] == GIB


def test_loads_run_side_by_side_within_one_budget(serve, folder):
    sizes = {"a": footprint(GIB), "b": footprint(GIB + (1 << 16)), "c": footprint(2 * GIB)}
    slow = {name: NullScript(weights_bytes=GIB - (1 << 16), kv_cache_bytes=0, load_s=1.0) for name in "abc"}
    server = serve(initial=(), footprints=sizes, scripts=slow, memory_limit_bytes=3 * GIB)
    client = server.http()
    first, second = (client.post("/admin/models", json={"source": name}).json() for name in "ab")
    while "b" not in server.workers:
        time.sleep(0.005)
    assert client.get("/admin/models/a").json()["state"] == "loading", "the second load waited for the first"
    assert server.registry.find("a").claim.memory_limit_bytes == 3 * GIB
    # the second load may use only what the first load has not reserved
    assert server.registry.find("b").claim.memory_limit_bytes == 2 * GIB
    assert {wait_for(client, operation)["state"] for operation in (first, second)} == {"succeeded"}
    # used_bytes counts the memory that the workers use, not what they reserved
    assert client.get("/admin/memory").json()["used_bytes"] == 2 * GIB


def test_without_a_planner_a_load_waits_for_the_one_before(serve, folder, answering):
    server = serve(initial=(), script=answering("", load_s=0.3), memory_limit_bytes=3 * GIB)
    client = server.http()
    operations = [client.post("/admin/models", json={"source": name}).json() for name in "ab"]
    assert set(server.workers) <= {"a"}
    ended = [wait_for(client, operation) for operation in operations]
    assert ended[1]["ended_at"] - ended[0]["ended_at"] > 0.25


def test_what_the_worker_says_about_memory_is_passed_on(serve, folder, answering):
    full = answering("", load_error=LoadError(ErrorCode.INSUFFICIENT_MEMORY, "needs 5, has 3", 5, 3))
    response = serve(script=full, initial=()).http().post("/admin/models", json={"source": "a", "wait": True})
    assert response.status_code == 507 and response.json()["error"]["required_bytes"] == 5


def test_dry_run_without_a_planner(serve, folder):
    response = serve(initial=()).http().post("/admin/models", json={"source": "a", "dry_run": True})
    assert response.status_code == 501 and response.json()["error"]["code"] == "preflight_unavailable"


def test_unload_drains(serve, answering):
    server = serve(script=answering("x" * 60, interval_s=0.02))
    got = {}
    asking = threading.Thread(target=lambda: got.update(chat=server.chat()))
    asking.start()
    while not server.worker.running:
        time.sleep(0.005)
    unloading = threading.Thread(target=lambda: got.update(gone=server.http().delete("/admin/models/null", params={"drain_s": 20})))
    unloading.start()
    while server.registry.models()[0].state != "draining":
        time.sleep(0.001)
    refused = server.chat()
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_not_ready" and refused.headers["retry-after"]
    asking.join(60)
    unloading.join(60)
    assert got["chat"].json()["choices"][0]["message"]["content"] == "x" * 60
    assert got["gone"].status_code == 200


def test_a_pinned_model_stays(serve):
    server = serve(initial=[ModelSpec("null", "null", pin=True)])
    assert server.http().delete("/admin/models/null").json()["error"]["code"] == "model_pinned"
    assert server.http().delete("/admin/models/null", params={"force": True}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("DELETE", "/admin/models/friend", None),
        ("DELETE", "/admin/models/friend:latest", None),
        ("POST", "/v1/models/friend/unload", {}),
        ("POST", "/v2/repository/models/friend/unload", {}),
        ("POST", "/models/unload", {"model": "friend"}),
    ],
)
def test_an_alias_unloads_nothing_and_names_its_model(serve, method, path, body):
    server = serve(initial=[ModelSpec("null", "null", aliases=("friend",))])
    refused = server.http().request(method, path, json=body)
    error = refused.json()["error"]
    assert refused.status_code == 409 and error["code"] == "name_is_alias"
    assert "'friend' is an alias of model 'null'; unload 'null'" in error["message"]
    assert server.chat(model="friend").status_code == 200


def test_an_alias_stays_when_the_new_model_fails_its_probe(serve, folder, answering):
    mute = answering("x" * 99, interval_s=0.05)
    server = serve(initial=(), scripts={"a": answering("from a"), "b": answering("from b"), "c": mute})
    client = server.http()
    for name in "abc":
        client.post("/admin/models", json={"source": name, "wait": True})
    assert client.put("/admin/aliases/chat", json={"model": "a", "probe": {"prompt": "hi", "expect": "from"}}).json() == {"chat": "a"}
    for body, why in (
        ({"model": "b", "probe": {"expect": "from a"}}, "expected an answer that contains 'from a'"),
        ({"model": "c", "probe": {"max_tokens": 50, "timeout": 0.1}}, "did not end within 0.1 s"),
    ):
        refused = client.put("/admin/aliases/chat", json=body)
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "probe_failed", refused.text
        assert why in refused.json()["error"]["message"]
    assert server.chat(model="chat").json()["choices"][0]["message"]["content"] == "from a"
    probed = server.workers["b"].submits[-1]
    assert probed.params.temperature == 0 and bytes(probed.prompt_ids[1:]) == b"Hello"


def test_a_load_that_would_take_an_alias_over_proves_itself_first(serve, folder, answering):
    broken = answering("fine", fail_after=0)
    server = serve(initial=(), scripts={"a": answering("from a"), "b": broken})
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["chat"], "wait": True})
    response = client.post("/admin/models", json={"source": "b", "aliases": ["chat"], "wait": True})
    assert response.json()["error"]["code"] == "probe_failed"
    assert server.workers["b"].state == "stopped" and {m["id"] for m in client.get("/admin/models").json()["data"]} == {"a"}
    assert server.chat(model="chat").json()["choices"][0]["message"]["content"] == "from a"


def test_alias_moves_from_one_model_to_the_next(serve, folder, answering):
    server = serve(initial=(), scripts={"a": answering("old"), "b": answering("new")})
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["chat"], "wait": True})
    assert server.chat(model="chat").json()["choices"][0]["message"]["content"] == "old"
    client.post("/admin/models", json={"source": "b", "wait": True})
    assert client.put("/admin/aliases/chat", json={"model": "b"}).json() == {"chat": "b"}
    assert server.chat(model="chat").json()["choices"][0]["message"]["content"] == "new"
    client.put("/admin/aliases/chat", json={"model": "a"})  # restore the alias
    assert server.chat(model="chat").json()["choices"][0]["message"]["content"] == "old"
    assert client.put("/admin/aliases/b", json={"model": "a"}).status_code == 409
    assert client.delete("/admin/aliases/chat").json() == {}


@pytest.mark.parametrize("source", ["..", "../x", "a/../../x", "/etc", "nowhere", "org/model", "a\x00", "x" * 1000, "link", ".", ""])
def test_sources_outside_the_root_are_refused(serve, folder, source):
    (folder / "models" / "link").symlink_to("/etc")
    response = serve(initial=()).http().post("/admin/models", json={"source": source})
    assert response.status_code == 400 and response.json()["error"]["param"] == "source"


def test_a_folder_whose_name_is_none_of_a_model_needs_another(serve, folder):
    """Characters that no name of a model has become hyphens, because clients use the name in paths such as that of the model's health
    probe. A folder without a letter or digit in its name can be loaded only if the request states another name."""
    for name in ("my model", "!?"):
        (folder / "models" / name).mkdir()
    client = serve(initial=()).http()
    assert client.post("/admin/models", json={"source": "my model", "wait": True}).status_code == 200
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["my-model"]
    response = client.post("/admin/models", json={"source": "!?"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "name"
    assert client.post("/admin/models", json={"source": "!?", "name": "mine", "wait": True}).status_code == 200


def test_hub_ids_are_taken_when_allowed(serve):
    server = serve(initial=(), allow_hub=True)
    assert server.http().post("/admin/models", json={"source": "org/model", "wait": True}).json()["result"]["source"] == "org/model"
    assert server.http().post("/admin/models", json={"source": "../model"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"source": "a", "name": "sp ace"}, "name"),
        ({"source": "a", "kv_cache_bytes": -1}, "kv_cache_bytes"),
        ({"source": "a", "max_batch": 0}, "max_batch"),
        ({"source": "a", "max_gap_ms": 0}, "max_gap_ms"),
        ({"source": "a", "dtype": "f32", "quantize": "int4-32"}, "dtype"),
        ({"source": "a", "quantize": "q4"}, "quantize"),
        ({"source": "a", "target": "avx3"}, "target"),
        ({"source": "a", "device": "gpu"}, "device"),
        ({"source": "a", "device": "cuda:x"}, "device"),
        ({"source": "a", "tool_parser": "x"}, "tool_parser"),
        ({}, "source"),
    ],
)
def test_fields_of_a_load(serve, folder, body, param):
    response = serve(initial=()).http().post("/admin/models", json=body)
    assert response.status_code in (400, 409) and response.json()["error"]["param"] == param


def test_an_alias_may_be_the_model_s_own_name(serve, folder, tmp_path):
    """Users of vLLM give a model the name that it has here in any case. The name of another model is refused."""
    state = tmp_path / "state.json"
    server = serve(initial=[ModelSpec("null", "null", aliases=("null", "friend"))], state_file=state)
    client = server.http()
    assert client.get("/admin/aliases").json() == {"friend": "null"}
    for _ in range(2):  # the second load only adds names
        loaded = client.post("/admin/models", json={"source": "a", "aliases": ["a", "mate"], "wait": True})
        assert loaded.status_code == 200, loaded.text
        assert client.get("/admin/aliases").json() == {"friend": "null", "mate": "a"}
    refused = client.post("/admin/models", json={"source": "b", "aliases": ["a"]})
    assert refused.status_code == 409 and refused.json()["error"]["param"] == "aliases"
    server.stop()
    again = serve(initial=[ModelSpec("null", "null", aliases=("null",))], state_file=state)
    assert again.http().get("/admin/aliases").json()["friend"] == "null"


def test_settings_that_a_load_does_not_offer_are_ignored(serve, folder):
    """`calibrate` would let a client read files of this machine; the registry alone says how much memory a load may take."""
    server = serve(initial=())
    hidden = {"calibrate": "/etc/hostname", "memory_limit_bytes": 1 << 50, "reserved_bytes": 5, "kv_share": 0.5}
    assert not hidden.keys() & LoadBody.model_fields.keys()
    response = server.http().post("/admin/models", json={"source": "a", "wait": True, **hidden})
    assert response.status_code == 200
    (model,) = server.registry.models()
    assert model.spec == ModelSpec(model.spec.name, model.spec.source)


def test_the_forms_of_weights_are_the_compiler_s():
    for form in get_args(WeightForm):
        WeightFormat.parse(form)
    for kind in ("int8", "int4"):
        assert {f"{kind}-{group}" for group in range(1, 257) if _parses(f"{kind}-{group}")} <= set(get_args(WeightForm))


def test_a_number_of_bits_is_a_form_of_weights(serve, folder):
    client = serve(initial=()).http()
    for number, bits in enumerate(("4.4", "4.6", "5", "5.25", "6.5")):
        assert WeightFormat.parse(bits).budget == float(bits)
        body = {"source": "a", "name": f"m{number}", "quantize": bits, "wait": True}
        loaded = client.post("/admin/models", json=body)
        assert loaded.status_code == 200 and loaded.json()["result"]["quantize"] == bits, loaded.text
    assert client.post("/admin/models", json={"source": "b", "dtype": "4.6", "wait": True}).json()["result"]["quantize"] == "4.6"
    for wrong in ("4,6", "4.6bit", "-4.6", "1e1", "nan", "4.", "46", "٤.٦"):
        refused = client.post("/admin/models", json={"source": "c", "quantize": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "quantize", refused.text


def _parses(form: str) -> bool:
    try:
        return bool(WeightFormat.parse(form))
    except ConfigError:
        return False


def test_the_set_of_models_survives_a_restart(serve, folder):
    state = folder / "state" / "models.json"
    first = serve(initial=(), state_file=state)
    first.http().post("/admin/models", json={"source": "a", "max_batch": 7, "max_gap_ms": 300, "embeddings": True, "wait": True})
    first.http().post("/admin/models", json={"source": "b", "wait": True})
    first.http().put("/admin/aliases/chat", json={"model": "a"})
    first.http().delete("/admin/models/b")
    first.stop()
    assert [spec.name for spec in msgspec.json.decode(state.read_bytes(), type=SavedState).models] == ["a"]
    second = serve(initial=(), state_file=state)
    (model,) = second.registry.models()
    assert (model.spec.name, model.spec.max_batch, model.spec.max_gap_ms, model.spec.embeddings) == ("a", 7, 300, True)
    assert load_of(model.spec).embeddings
    assert second.chat(model="chat").status_code == 200


def test_a_gguf_file_is_called_without_its_suffix_and_answers_to_both_names(serve, folder):
    server = serve(initial=())
    (server.settings.model_root / "org").mkdir(parents=True, exist_ok=True)
    (server.settings.model_root / "org" / "smollm2.gguf").touch()
    client = server.http()
    loaded = client.post("/admin/models", json={"source": "org/smollm2.gguf", "wait": True}).json()["result"]
    assert loaded["id"] == "smollm2" and loaded["aliases"] == ["smollm2.gguf"]
    for name in ("smollm2", "smollm2.gguf", "smollm2:latest"):
        assert server.chat(model=name).status_code == 200
    assert client.post("/admin/models", json={"source": "org/smollm2.gguf"}).json()["state"] == "succeeded", "the model is loaded already"


def test_a_model_saved_under_the_name_of_its_file_is_loaded_once(serve, folder):
    """Servers of earlier versions called a GGUF file by its whole name."""
    state = folder / "models.json"
    state.write_bytes(msgspec.json.encode(SavedState((ModelSpec("x.gguf", "/m/x.gguf", aliases=("x",)), ModelSpec("b", "y")))))
    server = serve(initial=[ModelSpec("x", "/m/x.gguf", aliases=("x.gguf",))], state_file=state)
    assert {model.spec.name for model in server.registry.models()} == {"x", "b"}
    assert server.chat(model="x.gguf").status_code == 200
    assert {spec.name for spec in msgspec.json.decode(state.read_bytes(), type=SavedState).models} == {"x", "b"}


def test_a_state_file_that_cannot_be_written_keeps_no_model_from_serving(serve, folder, caplog):
    (folder / "state").mkdir()
    server = serve(initial=(), state_file=folder / "state" / "models.json")
    (folder / "state" / "models.json").mkdir()  # the folder has the path of the file, so writing fails, as on a full disk
    client = server.http()
    assert client.post("/admin/models", json={"source": "a", "wait": True}).status_code == 200
    assert client.delete("/admin/models/a").status_code == 200
    assert "a restart will not know of this change" in caplog.text


def test_a_slow_disk_delays_no_request(serve, folder, monkeypatch):
    """An answer to an administrator waits until the state file is written; other requests do not."""
    begun, may_end, late, state = threading.Event(), threading.Event(), [], folder / "state.json"

    def write_slowly(file: Path, saved: SavedState) -> None:
        begun.set()
        late.append(not may_end.wait(60))
        write_state(file, saved)

    monkeypatch.setattr("server.models.saved_models.write_state", write_slowly)
    may_end.set()
    server = serve(state_file=state)
    client = server.http()
    for method, path, body in (
        ("PUT", "/admin/aliases/friend", {"model": "null"}),
        ("POST", "/admin/models", {"source": "a", "wait": True}),
        ("DELETE", "/admin/models/a", None),
    ):
        may_end.clear()
        begun.clear()
        asking = threading.Thread(target=partial(client.request, method, path, json=body))
        asking.start()
        assert begun.wait(60)
        assert server.chat(model="null").status_code == 200 and asking.is_alive() and not any(late)
        may_end.set()
        asking.join(60)
    assert [model.aliases for model in read_state(state).models] == [("friend",)]


def test_a_model_that_comes_back_takes_no_alias_back(serve, folder):
    """An alias of a model that could not be loaded, which another model has got meanwhile, stays with the other model."""
    state = folder / "state.json"
    write_state(state, SavedState((ModelSpec("a", "a", aliases=("mine", "yours")), ModelSpec("b", "b"))))
    server = serve(initial=(), state_file=state, scripts={"a": NullScript(load_error=LoadError(ErrorCode.LOAD_FAILED, "no disk"))})
    server.http().put("/admin/aliases/yours", json={"model": "b"})
    server.stop()
    assert {spec.name: spec.aliases for spec in read_state(state).models} == {"a": ("mine",), "b": ("yours",)}


@pytest.mark.parametrize(
    "lost",
    [ModelSpec("lost", "x"), ModelSpec("gone", "x", aliases=("lost", "late"))],
    ids=["name", "alias"],
)
def test_a_model_that_cannot_come_back_keeps_no_name_that_another_has_got(lost, serve, folder, answering):
    """Its name becomes an alias of another model, or its alias the name of another. Otherwise one of the two would not load at the next
    start."""
    state = folder / "state.json"
    write_state(state, SavedState((lost,)))
    broken = answering("", load_error=LoadError(ErrorCode.LOAD_REFUSED, "the disk is not mounted"))
    server = serve(initial=(ModelSpec("fine", "y"),), state_file=state, scripts={lost.name: broken})
    http = server.http()
    if lost.name == "lost":
        assert http.put("/admin/aliases/lost", json={"model": "fine"}).status_code == 200
    else:
        assert http.post("/admin/models", json={"source": "a", "name": "lost", "wait": True}).status_code == 200
    server.stop()
    again = serve(initial=(), state_file=state)  # all disks are mounted
    assert again.http().get("/admin/models").json()["failed"] == []
    assert again.chat(model="lost").status_code == 200
    assert {"fine"} <= {model.spec.name for model in again.registry.models()}


def test_names_that_clash_at_the_start_cost_one_model_not_the_server(serve, folder):
    state = folder / "models.json"
    state.write_bytes(msgspec.json.encode(SavedState((ModelSpec("a", "x"), ModelSpec("b", "y", aliases=("a",))))))
    server = serve(initial=[ModelSpec("c", "z")], state_file=state)
    assert {model.spec.name for model in server.registry.models()} == {"a", "c"}
    (failed,) = [o for o in server.http().get("/admin/operations").json()["data"] if o["state"] == "failed"]
    assert failed["model"] == "b" and failed["error"]["code"] == "model_exists"
    assert server.http().get("/health/ready").status_code == 200


@pytest.mark.parametrize(("cached", "order"), [("", ["a", "b", "s", "t"]), ("bt", ["b", "t", "a", "s"])])
def test_models_of_the_command_line_load_before_saved_ones(cached, order, serve, folder):
    """The memory may not be enough for all; then it is a saved model that is refused."""
    state = folder / "models.json"
    write_state(state, SavedState((ModelSpec("s", "x"), ModelSpec("b", "y"), ModelSpec("t", "w"))))
    given = [ModelSpec("a", "z"), ModelSpec("b", "y")]
    server = serve(initial=given, state_file=state, is_cached=lambda spec: spec.name in cached)
    assert [operation.model for operation in server.registry.operations.all()] == order


@pytest.mark.parametrize("cached", ["a", "b", "c"])
def test_names_of_the_command_line_win_over_those_of_the_state_file(cached, serve, folder):
    """A saved model keeps neither a name nor an alias that the command line gives to a model, whichever of them loads first."""
    state = folder / "models.json"
    write_state(state, SavedState((ModelSpec("b", "x"), ModelSpec("c", "y", aliases=("a", "mine", "yours")))))
    given = ModelSpec("a", "z", aliases=("b", "mine"))
    server = serve(initial=[given], state_file=state, is_cached=lambda spec: spec.name == cached)
    assert server.registry.aliases() == {"b": "a", "mine": "a", "yours": "c"}
    assert {model.spec.name for model in server.registry.models()} == {"a", "c"}
    server.stop()
    assert {spec.name: spec.aliases for spec in read_state(state).models} == {"a": ("b", "mine"), "c": ("yours",)}


def test_a_model_of_the_command_line_keeps_the_names_that_it_got_later(serve, folder):
    state = folder / "models.json"
    given = ModelSpec("a", "z", aliases=("mine",))
    first = serve(initial=[given, ModelSpec("b", "y")], state_file=state)
    assert first.http().put("/admin/aliases/late", json={"model": "a"}).status_code == 200
    assert first.http().put("/admin/aliases/taken", json={"model": "a"}).status_code == 200
    for name in ("pirate", "mine"):
        assert first.http().post("/api/create", json={"model": name, "from": "a", "system": "Arr."}).status_code == 200
    first.stop()
    second = serve(initial=[given, ModelSpec("b", "y", aliases=("taken",))], state_file=state)
    assert second.registry.aliases() == {"late": "a", "mine": "a", "pirate": "a", "taken": "b"}
    for name in ("pirate", "mine"):
        assert second.http().post("/api/show", json={"model": name}).json()["system"] == "Arr."


def test_a_model_of_the_command_line_keeps_its_later_names_although_its_source_changes(serve, folder):
    """For example, its name stays `small` when a file with fewer bits replaces its file."""
    state = folder / "models.json"
    write_state(state, SavedState((ModelSpec("small", "a.Q8.gguf", aliases=("late",)), ModelSpec("other", "b", aliases=("mine",)))))
    server = serve(initial=[ModelSpec("small", "a.Q4.gguf"), ModelSpec("c", "w", aliases=("other",))], state_file=state)
    assert server.registry.aliases() == {"late": "small", "other": "c"}
    assert server.registry.find("late").spec.source == "a.Q4.gguf"


def test_a_model_may_swap_its_name_and_its_alias_between_two_starts(serve, folder):
    state = folder / "models.json"
    write_state(state, SavedState((ModelSpec("prod", "z", aliases=("late", "qwen")),)))
    server = serve(initial=[ModelSpec("qwen", "z", aliases=("prod",))], state_file=state)
    assert server.registry.aliases() == {"late": "qwen", "prod": "qwen"}
    server.stop()
    assert {spec.name: spec.aliases for spec in read_state(state).models} == {"qwen": ("late", "prod")}


def test_a_name_that_a_running_load_will_take_as_its_alias_is_taken(serve, folder, answering):
    server = serve(initial=(), scripts={"a": answering("from a", load_s=0.5)})
    client = server.http()
    operation = client.post("/admin/models", json={"source": "a", "aliases": ["b"]}).json()
    refused = client.post("/admin/models", json={"source": "b"})
    assert refused.status_code == 409 and "'b' is an alias of model 'a'" in refused.json()["error"]["message"]
    assert wait_for(client, operation)["state"] == "succeeded"


def test_a_model_that_cannot_come_back_is_not_forgotten(serve, folder, answering):
    state = folder / "models.json"
    state.write_bytes(msgspec.json.encode(SavedState((ModelSpec("lost", "x"), ModelSpec("fine", "y")))))
    broken = answering("", load_error=LoadError(ErrorCode.LOAD_REFUSED, "the disk is not mounted"))
    server = serve(initial=(), state_file=state, scripts={"lost": broken})
    assert [model.spec.name for model in server.registry.models()] == ["fine"]
    names = lambda: [spec.name for spec in msgspec.json.decode(state.read_bytes(), type=SavedState).models]  # noqa: E731
    assert names() == ["lost", "fine"]
    assert server.http().delete("/admin/models/lost:latest").status_code == 200
    assert names() == ["fine"]


def test_twenty_loads_and_unloads_return_to_the_baseline(serve, folder):
    server = serve(initial=())
    client = server.http()
    sizes = []
    for _ in range(20):
        client.post("/admin/models", json={"source": "a", "wait": True})
        server.chat(model="a")
        gone = client.delete("/admin/models/a").json()
        sizes.append(gone["resident_after_bytes"])
        assert client.get("/admin/memory").json()["used_bytes"] == 0
    assert max(sizes[10:]) - sizes[5] < 8 << 20  # later rounds use no more memory; the first rounds fill caches


def test_cache_without_a_cache(server):
    for method in ("GET", "DELETE"):
        response = server.http().request(method, "/admin/cache")
        assert response.status_code == 501 and response.json()["error"]["code"] == "cache_unavailable"


class SlowCache:
    """A cache on a disk that takes long. It notes which threads wait for the disk."""

    def __init__(self) -> None:
        self.threads: list[int | None] = []

    def entries(self) -> list[CachedModel]:
        self.threads.append(threading.get_ident())
        return [CachedModel("null", 7, 1.5)]

    def clear(self, *, keep: frozenset[str]) -> int:
        self.threads.append(threading.get_ident())
        return 7 - len(keep)


def test_no_request_waits_for_the_disk_of_the_cache(serve):
    server = serve()
    server.registry.cache = cache = SlowCache()
    client = server.http()
    assert client.get("/admin/cache").json()["data"] == [{"signature": "null", "size_bytes": 7, "used_at": 1.5}]
    assert client.delete("/admin/cache").json() == {"freed_bytes": 6}
    assert len(cache.threads) == 2 and server.thread.ident not in cache.threads


def test_a_file_of_the_cache_that_cannot_be_removed_is_named(serve):
    class Foreign(SlowCache):
        def clear(self, *, keep: frozenset[str]) -> int:
            raise RuntimeFault("/cache/weights/x.rsw cannot be removed: Permission denied; remove it as the user that owns the folder")

    server = serve()
    server.registry.cache = Foreign()
    refused = server.http().delete("/admin/cache")
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "cache_not_cleared")
    assert "x.rsw cannot be removed: Permission denied" in refused.json()["error"]["message"]


def index(client, **body) -> dict:
    return {one["name"]: (one["state"], one["reason"]) for one in client.post("/v2/repository/index", json=body).json()}


def test_names_of_triton_and_llama(serve, folder):
    server = serve(initial=())
    client = server.http()
    loaded = client.post("/v1/models/a/load").json()
    assert loaded["id"] == "a" and loaded["object"] == "model" and loaded["created"] and loaded["owned_by"]
    assert client.post("/v2/repository/index").json() == [{"name": "a", "version": "1", "state": "READY", "reason": ""}]
    answer = client.post("/v2/repository/models/b/load", json={"parameters": {}})
    assert answer.status_code == 200 and answer.content == b""
    assert [client.get(f"/v2/models/{name}/ready").status_code for name in ("a", "b", "c")] == [200, 200, 400]
    answer = client.post("/v2/repository/models/b/unload", json={"parameters": {"unload_dependents": False}})
    assert answer.status_code == 200 and answer.content == b"" and client.get("/v2/models/b/ready").status_code == 400
    assert client.post("/v2/repository/models/b/load", json={"parameters": {"config": "{}"}}).status_code == 400
    assert client.post("/v1/models/a/unload").json() == {"status": "success", "model": "a"}
    assert client.post("/v1/models/a/unload").status_code == 404
    assert client.post("/models/load", json={"model": "c"}).json() == {"success": True}
    while client.get("/models").json()["data"][0]["status"]["value"] != "loaded":
        time.sleep(0.005)
    assert client.post("/models/unload", json={"model": "c"}).json() == {"success": True}


def test_loading_a_model_of_the_root_wakes_it(serve, folder):
    client = serve(initial=()).http()
    assert client.post("/v1/models/a/load").status_code == 200
    assert client.post("/sleep").status_code == 200
    assert client.post("/models/load", json={"model": "a"}).json() == {"success": True}
    assert client.get("/models").json()["data"][0]["status"]["value"] == "loaded"
    assert client.post("/sleep").status_code == 200
    assert client.post("/v1/models/a/load", json={"source": "a"}).status_code == 200
    assert client.get("/models").json()["data"][0]["status"]["value"] == "loaded", "a source that is the model's own loads no other"


@pytest.mark.parametrize("path", ["/models/load", "/v1/models/null/load", "/v2/repository/models/null/load"])
def test_loading_a_model_of_the_command_line_wakes_it(serve, path):
    """Such a model does not come from the model root. Open WebUI asks for this path to load a model."""
    server = serve()
    client = server.http()
    for _ in range(2):
        assert client.post(path, json={"model": "null"} if path == "/models/load" else {}).status_code == 200
        assert client.get("/models").json()["data"][0]["status"]["value"] == "loaded"
        assert client.post("/sleep").status_code == 200
        assert client.get("/models").json()["data"][0]["status"]["value"] == "sleeping"
    model = server.registry.models()[0]
    loaded, model.loaded, model.state = model.loaded, None, ModelState.LOADING
    assert client.post(path, json={"model": "null"} if path == "/models/load" else {}).status_code == 200
    model.loaded, model.state = loaded, ModelState.DRAINING
    busy = client.post(path, json={"model": "null"} if path == "/models/load" else {})
    model.state = ModelState.READY
    assert busy.status_code == 409 and "is being unloaded" in busy.json()["error"]["message"]
    refused = client.post(path.replace("null", "none"), json={"model": "none"} if path == "/models/load" else {})
    assert refused.status_code == 400 and "does not exist below the model root" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/a/load", {}),
        ("/v1/models/a/unload", {}),
        ("/v2/repository/models/a/load", {}),
        ("/v2/repository/models/a/unload", {}),
        ("/v2/repository/index", {}),
        ("/models/load", {"model": "a"}),
        ("/models/unload", {"model": "a"}),
    ],
)
def test_unknown_fields_are_named_under_the_paths_of_triton_and_llama(serve, folder, path, body):
    server = serve(initial=())
    if path.endswith("unload"):
        server.http().post("/admin/models", json={"source": "a", "wait": True})
    answer = server.http().post(path, json={**body, "typo": 1})
    assert answer.status_code == 200 and answer.headers["x-ignored-params"] == "typo"
    refused = serve(initial=(), strict=True).http().post(path, json={**body, "typo": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "typo"


# --- available sources, failed loads, and swaps --------------------------------------------------------------------------


def test_what_the_root_offers_is_listed(serve, folder):
    """`/admin/sources` lists the sources that can be loaded, with sizes and names. The model lists in the formats of Triton and llama.cpp
    also contain models that are not loaded, with their state."""
    server = serve(initial=())
    root, client = server.settings.model_root, server.http()
    for name in ("a", "org/x", "org/deep/er"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "config.json").write_text("{}")
    (root / "org" / "m.gguf").write_bytes(b"123")
    (root / ".hidden").mkdir()
    client.post("/admin/models", json={"source": "a", "name": "one", "wait": True})
    data = client.get("/admin/sources").json()["data"]
    assert [(one["source"], one["bytes"], one["loaded_as"]) for one in data] == [("a", 2, ["one"]), ("org/m.gguf", 3, []), ("org/x", 2, [])]
    assert all(one["modified_at"] > 0 for one in data)
    unloaded = ("UNAVAILABLE", "unloaded")
    assert index(client) == {"one": ("READY", ""), "org/m.gguf": unloaded, "org/x": unloaded}
    assert index(client, ready=True) == {"one": ("READY", "")}
    states = {one["id"]: one["status"] for one in client.get("/models").json()["data"]}
    assert states == {"one": {"value": "loaded"}, "org/m.gguf": {"value": "unloaded"}, "org/x": {"value": "unloaded"}}
    assert client.post("/v2/repository/models/org/x/load").status_code == 200 and client.get("/v2/models/org/x/ready").status_code == 200
    client.post("/sleep?model=one")
    assert client.get("/models").json()["data"][0]["status"] == {"value": "sleeping"}


@pytest.mark.parametrize("name", ["loop", "loop.gguf", "org/loop", "model/loop.safetensors"])
def test_a_link_to_itself_below_the_root_is_no_source(name, serve, folder):
    """A symbolic link that leads to itself is no source, and makes no admin path answer 500."""
    server = serve(initial=())
    root, client = server.settings.model_root, server.http()
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text("{}")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(root / name)
    assert [one["source"] for one in client.get("/admin/sources").json()["data"]] == ["model"]
    assert list(index(client)) == ["model"] and [one["id"] for one in client.get("/models").json()["data"]] == ["model"]
    answers = [
        client.post("/admin/models", json={"source": name}),
        client.post("/admin/models", json={"source": f"{name}/deeper"}),
        client.post("/models/load", json={"model": name}),
        client.post(f"/v2/repository/models/{name}/load"),
        client.post("/api/pull", json={"model": name}),
        client.request("DELETE", "/api/delete", json={"model": name}),
    ]
    assert {answer.status_code for answer in answers} <= {400, 404}, [answer.text for answer in answers]


def test_a_folder_that_may_not_be_read_hides_no_other_model(serve, folder, monkeypatch):
    """A disk that is mounted as the root has the folder `lost+found`, which only its administrator may read."""
    server = serve(initial=())
    root = server.settings.model_root
    (root / "lost+found").mkdir()
    for name in ("a", "z", "secret"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.json").write_text("{}")

    def refusing(look, place, *arguments, **options):
        if "lost+found" in place.parts[:-1] or (look == "iterdir" and place.name in ("lost+found", "secret")):
            raise PermissionError(13, "Permission denied", str(place))
        return originals[look](place, *arguments, **options)

    originals = {look: getattr(Path, look) for look in ("stat", "iterdir")}
    for look in originals:
        monkeypatch.setattr(Path, look, lambda place, *arguments, look=look, **options: refusing(look, place, *arguments, **options))
    assert [one["source"] for one in server.http().get("/admin/sources").json()["data"]] == ["a", "z"]


def test_a_folder_whose_name_is_no_unicode_hides_no_other_model(serve, folder):
    """JSON cannot name it, and a worker cannot be told of it."""
    server = serve(initial=())
    root, client = server.settings.model_root, server.http()
    for name in ("a", "m\udcff", "m\udcff.gguf"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "config.json").write_text("{}")
    (root / "link").symlink_to("m\udcff")
    assert [one["source"] for one in client.get("/admin/sources").json()["data"]] == ["a"]
    refused = client.post("/admin/models", json={"source": "link"})
    assert refused.status_code == 400 and "leads to a path that is no Unicode; rename it" in refused.json()["error"]["message"]


def test_a_root_that_is_a_link_to_itself_offers_nothing(serve, folder):
    (folder / "loop").symlink_to("loop")
    client = serve(initial=(), model_root=folder / "loop").http()
    assert client.get("/admin/sources").json()["data"] == []
    assert client.post("/admin/models", json={"source": "a"}).status_code == 400


def test_a_root_that_is_not_there_offers_nothing(serve, folder):
    assert serve(initial=(), model_root=folder / "none").http().get("/admin/sources").json()["data"] == []


def test_a_failed_load_stays_visible_until_the_model_is_there(serve, folder):
    refused = NullScript(load_error=LoadError(ErrorCode.LOAD_REFUSED, "no such family"))
    server = serve(initial=(), scripts={"a": refused})
    client = server.http()
    for _ in range(2):
        client.post("/admin/models", json={"source": "a", "wait": True})
    (failed,) = client.get("/admin/models").json()["failed"]
    assert failed["model"] == "a" and failed["error"]["message"] == "no such family"
    assert index(client) == {"a": ("UNAVAILABLE", "no such family")}
    (listed,) = client.get("/models").json()["data"]
    assert listed["status"] == {"value": "unloaded", "failed": True, "exit_code": 1}
    refused.load_error = None
    client.post("/admin/models", json={"source": "a", "wait": True})
    assert client.get("/admin/models").json()["failed"] == [] and index(client) == {"a": ("READY", "")}


def gone(client, name: str) -> bool:
    end = time.monotonic() + 60
    while name in index(client) and time.monotonic() < end:
        time.sleep(0.01)
    return name not in index(client)


def test_a_model_takes_the_place_of_another_in_one_call(serve, folder):
    """A load with `swap` replaces a model: once the new model is ready, the alias moves to it; the old model finishes its requests and is
    unloaded."""
    server = serve(initial=())
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["live"], "wait": True})
    answer = client.post("/admin/models", json={"source": "b", "aliases": ["live"], "swap": True, "wait": True})
    assert answer.status_code == 200 and client.get("/admin/aliases").json() == {"live": "b"}
    assert gone(client, "a") and server.chat(model="live").status_code == 200
    client.post("/admin/models", json={"source": "c", "aliases": ["live"], "wait": True})
    assert {"b", "c"} <= index(client, ready=True).keys(), "without swap the old one stays"
    client.post("/admin/models", json={"source": "b", "aliases": ["live"], "swap": True, "wait": True})
    assert gone(client, "c"), "a model that is there already takes over, too"


def test_a_load_that_joins_one_that_swaps_leaves_the_swap(serve, folder, answering):
    server = serve(initial=(), scripts={"b": answering("b", load_s=0.2)})
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["live"], "wait": True})
    client.post("/admin/models", json={"source": "b", "aliases": ["live"], "swap": True})
    client.post("/admin/models", json={"source": "b", "wait": True})
    assert gone(client, "a")


def test_a_server_that_stops_forgets_models_that_were_swapped_out(serve, folder, answering, tmp_path):
    """The next start loads only the model that took their place."""
    state = tmp_path / "state.json"
    server = serve(initial=(), scripts={"a": answering("long " * 20, interval_s=0.02)}, state_file=state, drain_s=60)
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["live"], "wait": True})
    asking = threading.Thread(target=lambda: server.chat(model="a"))
    asking.start()
    while not server.workers["a"].running:
        time.sleep(0.002)
    client.post("/admin/models", json={"source": "b", "aliases": ["live"], "swap": True, "wait": True})
    asyncio.run_coroutine_threadsafe(server.registry.close(), server.loop).result(60)
    asking.join(60)
    assert [model.name for model in read_state(state).models] == ["b"]


def test_nothing_is_swapped_for_what_fails_or_is_pinned_or_has_other_names(serve, folder):
    server = serve(initial=(), scripts={"b": NullScript(load_error=LoadError(ErrorCode.LOAD_REFUSED, "no"))})
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["live", "other"], "wait": True})
    assert client.post("/admin/models", json={"source": "b", "aliases": ["live"], "swap": True, "wait": True}).status_code == 400
    assert client.get("/admin/aliases").json() == {"live": "a", "other": "a"}
    client.post("/admin/models", json={"source": "c", "aliases": ["live"], "swap": True, "wait": True})
    assert client.get("/admin/aliases").json() == {"live": "c", "other": "a"} and "a" in index(client, ready=True)
    error = client.post("/admin/models", json={"source": "big", "swap": True}).json()["error"]
    assert error["param"] == "aliases"


def test_a_reload_takes_no_alias_back(serve, folder, answering):
    """Aliases that were moved or removed since the first load stay so, unless the new load asks for them."""
    states = ["one"]
    server = serve(initial=(), scripts={"a": answering("a"), "b": answering("b")}, identify=lambda _source: states[-1])
    client = server.http()
    client.post("/admin/models", json={"source": "a", "aliases": ["moved", "removed", "kept"], "wait": True})
    client.post("/admin/models", json={"source": "b", "wait": True})
    client.put("/admin/aliases/moved", json={"model": "b"})
    client.delete("/admin/aliases/removed")
    states.append("two")
    assert client.post("/admin/models", json={"source": "a", "aliases": ["new"], "wait": True}).json()["kind"] == "reload"
    assert client.get("/admin/aliases").json() == {"moved": "b", "kept": "a", "new": "a"}


def test_a_reload_swaps(serve, folder, answering):
    states = ["one"]
    server = serve(initial=(), script=answering(""), identify=lambda _source: states[-1])
    client = server.http()
    client.post("/admin/models", json={"source": "a", "wait": True})
    client.post("/admin/models", json={"source": "b", "aliases": ["live"], "wait": True})
    states.append("two")
    begun = client.post("/admin/models", json={"source": "a", "aliases": ["live"], "swap": True, "wait": True}).json()
    assert begun["kind"] == "reload" and client.get("/admin/aliases").json() == {"live": "a"} and gone(client, "b")


def test_of_two_unloads_during_a_reload_one_is_refused(serve, folder, answering):
    states = ["one"]
    server = serve(initial=(), scripts={"a": answering("old")}, identify=lambda _source: states[-1])
    client = server.http()
    client.post("/admin/models", json={"source": "a", "wait": True})
    states.append("two")
    server.scripts["a"] = answering("new", load_s=30)
    client.post("/admin/models", json={"source": "a"})

    async def unload_twice() -> list[object]:
        unloads = (server.registry.unload("a", drain_s=1) for _ in range(2))
        return await asyncio.gather(*unloads, return_exceptions=True)

    unloaded, refused = asyncio.run_coroutine_threadsafe(unload_twice(), server.loop).result(60)
    assert isinstance(unloaded, Unloaded) and isinstance(refused, ApiError) and refused.message == "model 'a' is draining"


def test_a_server_that_stops_lets_an_unload_end(serve, folder, answering, tmp_path):
    """The unloaded model is not loaded at the next start."""
    state = tmp_path / "state.json"
    server = serve(initial=(), script=answering("long " * 20, interval_s=0.02), state_file=state)
    server.http().post("/admin/models", json={"source": "a", "wait": True})
    asking = threading.Thread(target=lambda: server.chat(model="a"))
    asking.start()
    while not server.workers["a"].running:
        time.sleep(0.002)

    async def close_while_unloading() -> Unloaded:
        unloading = asyncio.create_task(server.registry.unload("a", drain_s=60))
        await asyncio.sleep(0)
        await server.registry.close()
        return await unloading

    unloaded = asyncio.run_coroutine_threadsafe(close_while_unloading(), server.loop).result(60)
    asking.join(60)
    assert unloaded.name == "a" and read_state(state) == SavedState()


def test_weights_that_are_larger_than_the_files_are_told(serve, folder, caplog):
    caplog.set_level("INFO")
    http = serve(initial=(), weigh=lambda _spec: 1 << 19).http()
    http.post("/admin/models", json={"source": "a", "quantize": "bf16", "wait": True})
    assert "a: its weights take 1.0 MiB as bf16; auto keeps the numbers of its files, about 512.0 KiB" in caplog.text
    http.post("/admin/models", json={"source": "b", "wait": True})
    assert "b: its weights" not in caplog.text


def test_a_plan_ends_with_its_client(serve, folder):
    """A plan may compile a model. If nobody waits for it, it is cancelled."""
    preflight = EndlessPlan()
    server = serve(initial=(), preflight=preflight)
    body = json.dumps({"source": "a", "dry_run": True}).encode()
    fields = ["POST /admin/models HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}"]
    head = "\r\n".join([*fields, "", ""]).encode()
    with server.connect() as sock:
        sock.sendall(head + body)
        assert preflight.begun.wait(60) and not preflight.ended.is_set()
    assert preflight.ended.wait(60)


def test_the_formats_of_a_source_are_compared(serve, folder):
    http = serve(initial=(), forms={"a": [FormEstimate("auto", 300, 0.0), FormEstimate("4bit", 100, 0.083)]}).http()
    compared = http.get("/admin/forms", params={"source": "a"}).json()
    rows = [{"quantize": "auto", "weights_bytes": 300, "loss": 0.0}, {"quantize": "4bit", "weights_bytes": 100, "loss": 0.083}]
    assert compared == {"object": "list", "source": "a", "cached": False, "data": rows}
    assert http.get("/admin/forms", params={"source": "../a"}).json()["error"]["code"] == "invalid_source"
    without = serve(initial=()).http().get("/admin/forms", params={"source": "a"})
    assert without.status_code == 501 and without.json()["error"]["code"] == "preflight_unavailable"
