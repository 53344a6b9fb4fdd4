"""llama.cpp's API over plain HTTP, with the requests that llama.cpp's own clients send."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext

import pytest

from server.api.llama_cpp.body import LlamaSampling
from server.errors import ApiError
from server.messages import Stats
from tests.doubles.worker import ByteTokenizer, NullScript

SAID = "Hello from the null device."
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, FILE = 258, 259, 260, 261
# Values that turn off optional features. Some clients send all of these fields in every request.
ALL_OFF = {
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n"],
    "top_n_sigma": -1,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "cache_prompt": True,
    "id_slot": 0,
    "n_keep": 0,
    "tfs_z": 1,
    "seed": -1,
    "stop": [],
    "grammar": "",
}


def complete(server, path="/completion", **fields):
    response = server.http().post(path, json={"prompt": "hi", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, path="/completion", **fields):
    response = server.http().post(path, json={"prompt": "hi", "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_whole_answer(server):
    answer = complete(server)
    assert answer["content"] == SAID and answer["stop"] is True and answer["stop_type"] == "eos" and answer["stopping_word"] == ""
    assert answer["model"] == "null" and answer["index"] == 0 and answer["truncated"] is False and answer["tokens"] == []
    assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["tokens_cached"]) == (3, len(SAID), 0)
    assert answer["prompt"] == "<s>hi" and "completion_probabilities" not in answer
    assert answer["timings"]["prompt_n"] == 3 and answer["timings"]["predicted_n"] == len(SAID)
    assert answer["generation_settings"]["n_ctx"] == 4096 and answer["generation_settings"]["n_predict"] == -1
    assert server.worker.submits[-1].params.max_tokens == 4096 - 3


def test_the_stream_ends_with_an_event_that_stops(server):
    *parts, last = stream(server)
    assert "".join(part["content"] for part in parts) == SAID and [part["stop"] for part in parts] == [False] * len(parts)
    assert [token for part in parts for token in part["tokens"]] == list(SAID.encode())
    assert last["stop"] is True and last["content"] == "" and last["stop_type"] == "eos" and last["tokens_predicted"] == len(SAID)


@pytest.mark.parametrize(
    ("fields", "content", "stop_type", "word"),
    [
        ({"n_predict": 5}, "Hello", "limit", ""),
        ({"max_tokens": 5}, "Hello", "limit", ""),
        ({"n_predict": 0}, "", "limit", ""),
        ({"n_predict": -2}, SAID, "eos", ""),
        ({"stop": [" from"]}, "Hello", "word", " from"),
    ],
)
def test_how_an_answer_ends(server, fields, content, stop_type, word):
    answer = complete(server, **fields)
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (content, stop_type, word)
    *parts, last = stream(server, **fields)
    assert "".join(part["content"] for part in parts) == content and (last["stop_type"], last["stopping_word"]) == (stop_type, word)


@pytest.mark.parametrize(
    ("fields", "num_said", "truncated"),
    [({}, 7, True), ({"n_predict": 7}, 7, True), ({"n_predict": 6}, 6, False), ({"stop": ["l"]}, 3, False)],
)
def test_an_answer_that_fills_the_context_is_truncated(serve, fields, num_said, truncated):
    server = serve(tokenizer=ByteTokenizer(), script=NullScript(max_context=10))
    for answer in (complete(server, **fields), stream(server, **fields)[-1]):
        assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["truncated"]) == (3, num_said, truncated)


def test_a_long_prompt_is_decoded_on_a_thread(serve):
    """The last event has the prompt as text. Decoding 100,000 tokens on the event loop would hold up all other streams."""
    threads = []

    class Watched(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=True):
            threads.append(threading.current_thread().name)
            return super().decode(ids, skip_special_tokens)

    server = serve(tokenizer=Watched(), script=NullScript(max_context=1 << 15))
    assert stream(server, prompt="x" * 20_000)[-1]["prompt"].endswith("xx")
    assert complete(server, prompt="x" * 20_000)["prompt"].endswith("xx")
    assert len(threads) == 2 and all(name.startswith("asyncio_") for name in threads), threads


def test_time_is_up_behind_the_first_new_line(serve, answering):
    """`t_max_predict_ms`, which editors send for code completion, ends the answer at the first line break after this time, without an
    error."""
    server = serve(script=answering("a\n" + "b" * 5000, interval_s=0.002))
    answer = complete(server, t_max_predict_ms=20)
    assert answer["stop_type"] == "limit" and answer["content"].startswith("a\nb") and len(answer["content"]) < 5000
    assert server.worker.running == {}


def test_the_token_that_ends_an_answer_is_counted_and_not_shown(serve, answering):
    server = serve(script=answering("ab", stop_token_id=257))
    answer = complete(server, return_tokens=True)
    assert (answer["tokens"], answer["tokens_predicted"], answer["stop_type"]) == ([97, 98], 3, "eos")


def test_several_prompts_and_several_answers(server):
    answers = complete(server, prompt=["a", [98, 99]], n_cmpl=2)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3] and {answer["content"] for answer in answers} == {SAID}
    assert [answer["tokens_evaluated"] for answer in answers] == [2, 2, 2, 2]
    texts = ["", "", "", ""]
    for part in stream(server, prompt=["a", [98, 99]], n_cmpl=2):
        texts[part["index"]] += part["content"]
    assert texts == [SAID] * 4
    assert complete(server, prompt=["a"])["content"] == SAID


def test_sampling_reaches_the_worker(server):
    plain = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 5, "ignore_eos": True}
    answer = complete(server, **plain, repeat_penalty=1.5, repeat_last_n=-1)
    params = server.worker.submits[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.25, 7, 0.5, 0.1)
    assert (params.repetition_penalty, params.seed, params.ignore_eos) == (1.5, 5, True)
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["repeat_penalty"], settings["seed"]) == (0.25, 1.5, 5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "seed": -1}),
        ("/v1/completions", {"prompt": "hi", "seed": -1}),
        ("/api/generate", {"prompt": "hi", "stream": False, "options": {"seed": -1}}),
    ],
)
def test_a_seed_of_minus_one_is_a_new_one_in_other_apis(server, path, body):
    for _ in range(2):
        assert server.http().post(path, json={"model": "null", **body}).status_code == 200
    first, second = (submit.params.seed for submit in server.worker.submits[-2:])
    assert first != second


def test_a_seed_of_minus_one_is_a_new_one_each_time(server):
    seeds = {complete(server, seed=seed)["generation_settings"]["seed"] for seed in (-1, -1, 2**32 - 1)}
    assert len(seeds) == 3


@pytest.mark.parametrize("fields", [{"json_schema": {"const": "zebra"}}, {"grammar": 'root ::= "zebra"'}])
def test_an_answer_may_be_held_to_a_form(server, fields):
    complete(server, **fields)
    assert "zebra" in server.worker.submits[-1].params.constraint.source


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([[65, 1.5], [66, False]], {65: 1.5, 66: -100}),
        ([["AB", -1]], {65: -1, 66: -1}),
        ({"65": 2, "B": False}, {65: 2, 66: -100}),
    ],
)
def test_a_bias_takes_all_of_its_forms(server, bias, expected):
    complete(server, logit_bias=bias)
    assert dict(server.worker.submits[-1].params.logit_bias) == expected


def test_probabilities_before_and_after_sampling(server):
    entries = complete(server, n_probs=2, n_predict=2)["completion_probabilities"]
    assert [(entry["id"], entry["token"], entry["bytes"]) for entry in entries] == [(72, "H", [72]), (101, "e", [101])]
    assert entries[0]["logprob"] == -0.5 and [top["id"] for top in entries[0]["top_logprobs"]] == [72, 73]
    parts = stream(server, n_probs=2, n_predict=2)
    assert [entry for part in parts for entry in part.get("completion_probabilities", [])] == entries
    (entry,) = complete(server, n_probs=1, n_predict=1, post_sampling_probs=True)["completion_probabilities"]
    assert entry["prob"] == pytest.approx(0.6065, abs=1e-3) and entry["top_probs"][0]["prob"] == entry["prob"] and "logprob" not in entry
    assert server.worker.submits[-1].params.processed_logprobs


def test_only_the_fields_that_are_asked_for(server):
    paths = ["content", "timings/predicted_n", "generation_settings/n_predict", "no/such"]
    answer = complete(server, response_fields=paths)
    assert answer == {"content": SAID, "timings/predicted_n": len(SAID), "generation_settings/n_predict": -1}


def test_samplers_that_are_off_are_no_fault(server):
    response = server.http().post("/completion", json={"prompt": "hi", **ALL_OFF})
    assert response.status_code == 200 and "x-ignored-params" not in response.headers, response.text
    response = server.http().post("/completion", json={"prompt": "hi", "samplers": ["top_k", "temperature"]})
    assert response.headers["x-ignored-params"] == "samplers", "the order of samplers is fixed, so the field is ignored"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "null", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"model": "null", "prompt": "hi"}),
        ("/v1/responses", {"model": "null", "input": "hi"}),
        ("/v1/messages", {"model": "null", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ],
)
def test_samplers_that_are_off_are_no_fault_in_other_apis(server, body, path):
    foreign = ("repeat_penalty",) if path == "/v1/messages" else ()  # the API has no penalties
    off = {name: value for name, value in ALL_OFF.items() if name not in ("cache_prompt", "id_slot", "stop", "grammar", *foreign)}
    response = server.http().post(path, json={**body, **off})
    assert response.status_code == 200 and "x-ignored-params" not in response.headers, response.text
    assert server.http().post(path, json={**body, "mirostat": None, "mirostat_tau": 5.0}).status_code == 200
    for on in ({"mirostat": 2}, {"xtc_probability": 0.5}, {"adaptive_target": 0}, {"tfs_z": 0.0}, {"repeat_penalty": 1.1}):
        if on.keys() & set(foreign):
            continue
        refused = "repeat_last_n" if "repeat_penalty" in on else next(iter(on))
        error = server.http().post(path, json={**body, **off, **on}).json()["error"]
        assert error["code"] == "unsupported_field" and error["param"] == refused


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_no_penalty_applies_although_its_window_is_empty(server, path):
    """In llama.cpp, repeat_last_n 0 turns all penalties off."""
    body = {"model": "null", "prompt": "hi", "repeat_last_n": 0}
    assert server.http().post(path, json=body).status_code == 200
    error = server.http().post(path, json={**body, "frequency_penalty": 0.5}).json()["error"]
    assert "repeat_last_n" in error["message"], error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/completion", {"mirostat": 2}, "mirostat"),
        ("/completion", {"dry_multiplier": 0.8, "dry_base": 1.75}, "dry_multiplier"),
        ("/completion", {"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ("/completion", {"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ("/completion", {"prompt": None}, "prompt"),
        ("/completion", {"n_probs": 21}, "n_probs"),
        ("/completion", {"logit_bias": [[65, True]]}, "logit_bias[0]"),
        ("/completion", {"logit_bias": [[65, 101]]}, "logit_bias[0]"),
        ("/completion", {"n_cmpl": 200}, "n_cmpl"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/tokenize", {"content": "a", "parse_special": False, "prompt": None}, "parse_special"),
        ("/tokenize", {"content": "a"}, "prompt"),
        ("/apply-template", {}, "messages"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(server, path, fields, param):
    response = server.http().post(path, json={"prompt": "hi", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_gap_is_filled_between_the_model_s_tokens(serve):
    server = serve(tokenizer=ByteTokenizer(specials=FIM))
    body = {"input_prefix": "ab", "input_suffix": "cd", "prompt": "e", "input_extra": [{"filename": "f", "text": "g"}], "n_predict": 5}
    assert complete(server, "/infill", **body)["content"] == "Hello"
    expected = (256, FILE, *b"f\ng\n", PREFIX, *b"ab", SUFFIX, *b"cd", MIDDLE, *b"e")
    assert server.worker.submits[-1].prompt_ids == expected
    parts = stream(server, "/infill", **body)
    assert "".join(part["content"] for part in parts) == "Hello"


def test_tokens_and_their_pieces(server):
    client = server.http()
    assert client.post("/tokenize", json={"content": "hi"}).json() == {"tokens": [104, 105]}
    assert client.post("/tokenize", json={"content": "hi", "add_special": True}).json() == {"tokens": [256, 104, 105]}
    pieces = client.post("/tokenize", json={"content": "aä", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 164, "piece": [164]}]
    assert client.post("/detokenize", json={"tokens": [104, 105]}).json()["content"] == "hi"


def test_a_template_is_applied(server):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.http().post("/apply-template", json=body).json() == {"prompt": "<|user|>hi\n<|assistant|>"}


def test_properties_and_slots(server):
    client = server.http()
    for path in ("/props", "/props?model=null"):
        props = client.get(path).json()
        assert props["total_slots"] == 64 and props["default_generation_settings"]["n_ctx"] == 4096
        assert props["chat_template"] == "{# of the null model #}" and props["model_alias"] == "null" and props["is_sleeping"] is False
    assert client.get("/props?model=other").status_code == 404
    slots = client.get("/slots").json()
    assert len(slots) == 64 and not any(slot["is_processing"] for slot in slots)
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200


def test_a_busy_server_has_no_slot(serve):
    server = serve()
    server.worker.stats = Stats(64, 0, 0, 1, 0, 0, 0, 0, 0.0, 0.0)
    client = server.http()
    assert all(slot["is_processing"] for slot in client.get("/slots").json())
    assert client.get("/slots?fail_on_no_slot=1").status_code == 503


def test_health_under_llama_cpp_s_name(serve, answering):
    assert serve().http().get("/v1/health").json()["status"] == "ok"
    assert serve(api_keys=["a-key-of-a-client"]).http().get("/v1/health").status_code == 200


def test_a_failure_in_a_stream_is_an_event(serve, answering):
    parts = stream(serve(script=answering("abcdef", fail_after=3)))
    assert parts[-1]["error"]["code"] == "generation_failed"


def test_an_answer_to_several_prompts_ends_each_once_in_time(serve, answering):
    """More steps of a prompt may be on their way when its time is over."""
    server = serve(script=answering("a\n" + "b" * 500))
    body = {"prompt": ["one", "two", "three"], "t_max_predict_ms": 1, "stream": True, "n_predict": 400}
    answer = server.http().post("/completion", json=body).text
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    assert sorted(event["index"] for event in events if event["stop"]) == [0, 1, 2]


@pytest.mark.parametrize(("num_tokens", "fits"), [(1024, True), (1025, False)])
def test_texts_have_a_bias_for_as_many_tokens_as_ids(num_tokens, fits):
    class Long(ByteTokenizer):
        def encode(self, text, add_special_tokens):
            return list(range(num_tokens))

    body = LlamaSampling.model_validate({"logit_bias": [["a text", 1.0]]})
    with nullcontext() if fits else pytest.raises(ApiError, match="logit_bias has 1025 tokens; expected at most 1024"):
        assert len(body.completion("x", Long(), None).logit_bias or {}) == num_tokens
