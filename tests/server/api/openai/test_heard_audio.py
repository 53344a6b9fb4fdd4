"""Conversations with audio: what reaches the chat template beside the recordings, and how many decoded bytes a request may have."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from runtime.fits import Tiles
from runtime.spectrogram import RATE
from server.api.request import media
from server.defaults import Defaults
from server.messages import Listening, Vision
from server.models.state import ModelSpec
from server.text.templates.built_in import BUILT_IN
from server.text.templates.outside import OutsideTemplate
from tests.doubles.worker import ByteTokenizer
from tests.server.audio.files import tone, wav
from tests.server.images.files import data_url, encoded, image

LISTENING = Listening(258, num_mels=128, num_hops=100, frames_each=4, ends=False, most_windows=0)
VISION = Vision(16, edge_tokens=1, image_token=256, fit=Tiles(longest_edge=32), filter=1)
HEARD = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(tone(RATE), RATE)).decode(), "format": "wav"}}
SEEN = {"type": "image_url", "image_url": {"url": data_url(encoded(image()))}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be kind."}
PLACE = "[BEGIN_AUDIO]" + "[AUDIO]" * 12


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}


@pytest.fixture
def listener(serve, answering):
    """Return a server whose model has the template of Voxtral, which refuses a system message beside audio."""
    tokenizer = ByteTokenizer(specials=["[AUDIO]"])
    tokenizer.chat_template = OutsideTemplate(BUILT_IN["voxtral"], {})

    def start(system: str | None = None, **options: Any):
        spec = ModelSpec("null", "null", defaults=Defaults(system=system))
        return serve(script=answering("", listening=LISTENING), tokenizer=tokenizer, initial=(spec,), **options)

    return start


def prompt(server: Any, *messages: Any, **body: Any) -> str:
    answer = server.http().post("/v1/chat/completions/render", json={"messages": messages, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


def refusal(server: Any, *messages: Any, **body: Any) -> dict[str, Any]:
    answer = server.chat(messages=messages, **body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_tools_and_the_default_system_message_begin_the_users_message_beside_audio(listener) -> None:
    plain, kind = listener(), listener("Be kind.")
    assert prompt(plain, asked(HEARD)) == f"<s>[INST]{PLACE}What is it?[/INST]"
    assert prompt(kind, asked(HEARD)) == f"<s>[INST]Be kind.\n\n{PLACE}What is it?[/INST]"
    with_tools = prompt(plain, asked(HEARD), tools=[TOOL])
    assert with_tools.startswith("<s>[INST]You can call functions.") and with_tools.endswith(f"\n\n{PLACE}What is it?[/INST]")
    both = prompt(kind, asked(HEARD), tools=[TOOL])
    assert both.startswith("<s>[INST]You can call functions.") and both.endswith(f"Be kind.\n\n{PLACE}What is it?[/INST]")


def test_without_audio_they_are_a_system_message(listener) -> None:
    kind = listener("Be kind.")
    assert prompt(kind, asked()) == "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]What is it?[/INST]"
    assert prompt(kind, asked(), tools=[TOOL]).startswith("<s>[SYSTEM_PROMPT]Be kind.\n\nYou can call functions.")


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_clients_own_system_message_beside_audio_is_refused(listener, tools) -> None:
    error = refusal(listener(), SYSTEM, asked(HEARD), tools=tools)
    assert error["code"] == "template_failed" and "only in conversations without a system message; leave it out" in error["message"]


def test_the_decoded_bytes_of_recordings_are_limited(listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file can have many samples. All samples of a request reach the worker, and may be sent to one worker after another."""
    server = listener()
    monkeypatch.setattr(media, "MOST_BYTES", 20_000)
    assert server.chat(messages=[asked(HEARD)]).status_code == 200
    error = refusal(server, asked(HEARD, HEARD))
    assert (error["code"], error["param"]) == ("invalid_value", "messages")
    assert "the recordings up to messages[0].content[1] have 3" in error["message"]
    assert error["message"].endswith("bytes when they are decoded; expected at most 20000: send fewer, or shorter ones")
    assert server.chat(messages=[asked(HEARD)]).status_code == 200


def test_the_decoded_bytes_of_images_are_limited(serve, answering, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(script=answering("", vision=VISION))
    monkeypatch.setattr(media, "MOST_BYTES", 2 * 5 * 16 * 16 * 3)
    assert server.chat(messages=[asked(SEEN, SEEN)]).status_code == 200
    error = refusal(server, asked(SEEN), asked(SEEN, SEEN))
    assert (
        "the images up to messages[1].content[1] have 11520 bytes" in error["message"] and "send fewer, or smaller ones" in error["message"]
    )
