from __future__ import annotations

import pytest


def test_there_and_back(server):
    client = server.http()
    answer = client.post("/tokenize", json={"prompt": "né", "return_token_strs": True}).json()
    assert answer["tokens"] == [256, *"né".encode()] and answer["count"] == 4 and answer["max_model_len"] == 4096
    assert answer["token_strs"][:2] == ["<s>", "n"]
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<s>né", "content": "<s>né"}
    skipped = client.post("/v1/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": True})
    assert skipped.json() == {"prompt": "né", "content": "né"}


def test_a_conversation_is_tokenized_as_chat_does_it(server):
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.http().post("/v1/tokenize", json={"messages": messages}).json()["tokens"]
    server.chat(messages=messages)
    assert tuple(tokens) == server.worker.submits[-1].prompt_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_refusals(server, path, body, param):
    response = server.http().post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_long_texts_do_not_hold_up_others(server):
    answer = server.http().post("/tokenize", json={"prompt": "x" * 100_000})
    assert answer.json()["count"] == 100_001
