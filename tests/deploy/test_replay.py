"""Logged requests are sent again, and the first answer that differs is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.commands import app
from deploy.client import Client, ServerFault
from deploy.replay import Logged, first_difference, parsed, read_log, replay
from tests.doubles.worker import ByteTokenizer, NullScript
from tests.server.api.test_llama_cpp import FIM
from tests.server.conftest import serve
from tests.server.http.test_kept_requests import lines

__all__ = ["serve"]

ASKED = [{"role": "user", "content": "hi"}]
SEEDLESS = [  # a seed that is null, or that asks for a random one, is no seed
    ("/v1/chat/completions", {"messages": ASKED, "seed": None}),
    ("/v1/completions", {"prompt": "hi", "seed": None}),
    ("/completion", {"prompt": "hi", "n_predict": 4, "seed": -1}),
    ("/api/chat", {"model": "null", "messages": ASKED, "options": None}),
    ("/api/generate", {"model": "null", "prompt": "hi", "options": {"seed": None}}),
]
BODIES = [
    ("/v1/chat/completions", {"messages": ASKED}),
    ("/v1/chat/completions", {"messages": ASKED, "stream": True, "logprobs": True, "n": 2}),
    ("/v1/completions", {"prompt": "hi", "temperature": 0.7}),
    ("/api/chat", {"model": "null", "messages": ASKED}),
    *SEEDLESS,
    ("/invocations", {"messages": ASKED}),
    ("/inference/v1/generate", {"token_ids": [104, 105], "sampling_params": {"max_tokens": 4}}),
    ("/inference/v1/generate", {"token_ids": [104, 105], "stream": True}),
    ("/v1/messages", {"model": "null", "max_tokens": 9, "messages": ASKED}),
    ("/v1/messages", {"model": "null", "max_tokens": 9, "messages": ASKED, "temperature": 0, "stream": True}),
    ("/v1/responses", {"input": "hi", "temperature": 0, "stream": True}),
]


@pytest.fixture
def logged(serve: Any, tmp_path: Path) -> tuple[Any, Path]:
    place = tmp_path / "requests.jsonl"
    server = serve(keep_requests=place)
    for path, body in BODIES:
        assert server.http().post(path, json=body).status_code == 200, path
    lines(place, len(BODIES))
    copy = tmp_path / "log.jsonl"
    copy.write_bytes(place.read_bytes())
    return server, copy


def test_the_same_model_answers_alike(logged: tuple[Any, Path]) -> None:
    server, log = logged
    found = replay(log, Client(server.url))
    assert (found.num_equal, found.num_skipped, found.difference) == (len(BODIES), 0, None)


def test_code_between_other_code_is_repeated(serve: Any, tmp_path: Path) -> None:
    place, server = tmp_path / "requests.jsonl", serve(keep_requests=tmp_path / "requests.jsonl", tokenizer=ByteTokenizer(specials=FIM))
    body = {"input_prefix": "ab", "input_suffix": "cd", "prompt": "e", "n_predict": 5}
    assert server.http().post("/infill", json=body).status_code == 200
    (kept,) = lines(place, 1)
    (tmp_path / "log").write_text(json.dumps(kept) + "\n")
    found = replay(tmp_path / "log", Client(server.url))
    assert (found.num_equal, found.num_skipped, found.difference) == (1, 0, None)


def test_vectors_and_scores_are_repeated(serve: Any, tmp_path: Path) -> None:
    """No token is drawn for them, so they need no seed."""
    place, server = tmp_path / "requests.jsonl", serve(keep_requests=tmp_path / "requests.jsonl", script=NullScript(embedding_size=8))
    bodies = [
        ("/v1/embeddings", {"input": ["a", "bc"]}),
        ("/api/embed", {"model": "null", "input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
    ]
    for path, body in bodies:
        assert server.http().post(path, json=body).status_code == 200, path
    kept = lines(place, len(bodies))
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, kept)) + "\n")
    found = replay(log, Client(server.url))
    assert (found.num_equal, found.num_skipped, found.difference) == (len(bodies), 0, None)
    kept[0]["answer"] = kept[0]["answer"].replace('"embedding":[', '"embedding":[7,')
    log.write_text("\n".join(map(json.dumps, kept)) + "\n")
    found = replay(log, Client(server.url))
    assert found.difference is not None and found.difference.field.startswith("data[0].embedding")


def test_the_first_difference_is_shown(logged: tuple[Any, Path]) -> None:
    server, log = logged
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    kept[1]["answer"] = kept[1]["answer"].replace('"content":" null"', '"content":" mull"').replace('"content":"n"', '"content":"m"')
    log.write_text("\n".join(map(json.dumps, kept)) + "\n")
    found = replay(log, Client(server.url))
    assert found.num_equal == 1 and found.difference is not None
    assert found.difference.request.line == 2 and found.difference.field.startswith("choices[0].")
    result = CliRunner().invoke(app, ["replay", str(log), "--url", server.url])
    assert result.exit_code == 1 and "line 2: choices[0]." in result.output and "logged" in result.output


def test_a_request_without_a_seed_is_sent_with_the_one_that_was_drawn(logged: tuple[Any, Path]) -> None:
    server, log = logged
    drawn = {json.loads(line)["seed"] for line in log.read_text().splitlines()}
    server.worker.submits.clear()
    replay(log, Client(server.url))
    seeds = {submit.params.seed for submit in server.worker.submits if submit.params.temperature}
    assert seeds and seeds <= drawn


def test_a_null_seed_makes_no_random_answer_repeatable(tmp_path: Path) -> None:
    kept = {"status": 200, "complete": True, "method": "POST", "request_id": "1", "system_fingerprint": "fp", "seed": 5, "answer": "{}"}
    body = {"input": "hi", "seed": None}
    (tmp_path / "log").write_text(json.dumps({**kept, "path": "/v1/responses", "request": json.dumps(body)}) + "\n")
    (logged,) = read_log(tmp_path / "log")
    assert isinstance(logged, Logged) and not logged.is_repeatable


def test_the_command_says_that_all_are_equal(logged: tuple[Any, Path]) -> None:
    server, log = logged
    with log.open("a") as file:
        file.write(json.dumps({**json.loads(log.read_text().splitlines()[0]), "status": 499}) + "\n")
    result = CliRunner().invoke(app, ["replay", str(log), "--url", server.url])
    assert result.exit_code == 0, result.output
    assert f"{len(BODIES)} answers are equal; 1 skipped" in result.output


def test_torn_lines_are_skipped_and_counted(logged: tuple[Any, Path]) -> None:
    server, log = logged
    first, *others = log.read_bytes().splitlines(keepends=True)
    cut = '{"time": "2026-01-01T00:00:00Z", "request": "na\u00ef'.encode()[:-1]  # ends within a character
    log.write_bytes(b"".join([first, cut, b"\n", *others, b"{"]))
    found = replay(log, Client(server.url))
    assert (found.num_equal, found.num_skipped, found.num_torn, found.difference) == (len(BODIES), 0, 2, None)
    result = CliRunner().invoke(app, ["replay", str(log), "--url", server.url])
    assert result.exit_code == 0 and f"{len(BODIES)} answers are equal; 2 torn lines" in result.output, result.output


def test_events_are_joined_however_they_were_cut() -> None:
    def stream(*texts: str) -> str:
        return "".join(f'data: {{"choices": [{{"index": 0, "delta": {{"content": "{text}"}}}}]}}\n\n' for text in texts) + "data: [DONE]\n"

    assert parsed(stream("Par", "is")) == parsed(stream("P", "ari", "s"))
    assert first_difference(parsed(stream("Par", "is")), parsed(stream("Pas")))[0] == "choices[0].delta.content from character 2"


@pytest.mark.parametrize("text", ["no json\n", "{}\n", '{"status": 200, "complete": true, "method": "POST", "request": "[1]"}\n'])
def test_what_is_no_log_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(ServerFault, match=r"line 1 of .*log is no kept request; expected a file that the setting keep_requests names"):
        list(read_log(tmp_path / "log"))
    with pytest.raises(ServerFault, match="cannot be read: No such file"):
        list(read_log(tmp_path / "absent"))


def test_only_line_feeds_end_the_lines_of_a_stream() -> None:
    """JSON may hold other ends of lines as they are, such as U+2028, and an event would be left out with the text that differs."""
    stream = 'data: {"choices":[{"index":0,"delta":{"content":"one\u2028two\x85"}}]}\n\ndata: [DONE]\n\n'
    assert parsed(stream) == {"choices": [{"index": 0, "delta": {"content": "one\u2028two\x85"}}]}
