"""Real models answer conversations with the stored bytes: alone, all at once, with a cached prefix, in small chunks, and after their worker
was killed. `pytest --update-golden` stores what one conversation after another answers."""

from __future__ import annotations

import json
import os
import platform
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import workers_of

GOLDEN = Path(__file__).parent / "answers.json"
CHATS = ("smollm2", "qwen2.5-coder-1.5b")
SYSTEM = {"role": "system", "content": "You are a careful assistant. Answer briefly."}
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Germany?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Explain photosynthesis in one sentence.",
    "Write a Python function that reverses a string.",
    "List the planets of the solar system.",
    "What is the opposite of 'hot'?",
    "Give me a recipe for pancakes.",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog sleeps on.",
    "Was ist die Hauptstadt von Italien?",
    "¿Cuántos días tiene una semana?",
    "Complete: Roses are red, violets are",
    "Is 91 a prime number?",
    "Convert 100 degrees Celsius to Fahrenheit.",
    "Write one line of SQL that counts the rows of table users.",
    "Why is the sky blue?",
)
CONVERSATIONS = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
LONG = [
    SYSTEM,
    {"role": "user", "content": "\n".join(f"{i}. {question}" for i, question in enumerate(QUESTIONS, 1)) + "\nAnswer number 7."},
]

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor, for which answers are stored"
)


def summary(choice: dict[str, Any]) -> dict[str, Any]:
    """Return what must not change: the text, and each token's log-probability to the last bit."""
    return {
        "text": choice["message"]["content"],
        "end": choice["finish_reason"],
        "logprobs": [token["logprob"] for token in choice["logprobs"]["content"]],
    }


@pytest.fixture(params=CHATS)
def chat(request: pytest.FixtureRequest, serve_real: Any) -> Any:
    return request.param, serve_real(request.param)


def test_conversations_get_their_stored_answers(chat: Any, pytestconfig: pytest.Config) -> None:
    name, server = chat
    found = [summary(server.chat(messages)) for messages in CONVERSATIONS]
    stored = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if pytestconfig.getoption("--update-golden"):
        stored[name] = found
        GOLDEN.write_text(json.dumps(stored, indent=0, ensure_ascii=False) + "\n")
    assert [one["text"] for one in found] == [one["text"] for one in stored[name]]
    assert found == stored[name]


def test_a_full_batch_gets_the_same_bytes(chat: Any) -> None:
    name, server = chat
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        found = [summary(choice) for choice in pool.map(server.chat, CONVERSATIONS)]
    assert found == json.loads(GOLDEN.read_text())[name]


def test_a_cached_prefix_changes_no_bit(chat: Any) -> None:
    _, server = chat
    first, second = server.chat(LONG), server.chat(LONG)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert summary(first) == summary(second)


def test_a_killed_worker_changes_no_bit(chat: Any) -> None:
    name, server = chat
    (worker,) = workers_of(server.pid)
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        asked = [pool.submit(server.chat, messages) for messages in CONVERSATIONS]
        asked[0].result()
        os.kill(worker, signal.SIGKILL)
        found = [summary(one.result()) for one in asked]
    assert found == json.loads(GOLDEN.read_text())[name]
    assert workers_of(server.pid) != [worker]
