"""A realtime session loses no audio, holds little memory, and ends for a reason, whatever its client and its key do."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus

from server.api.speech import realtime
from server.api.speech.realtime import _event_of, _Item, _Talk
from server.api.speech.realtime_memory import SessionMemory, Share
from server.api.speech.realtime_session import RATE
from server.errors import INVALID_API_KEY, RATE_LIMITED, ApiError
from server.http.websocket import CloseCode, WebSocketError
from server.models.state import ModelSpec
from tests.server.other_tasks import turns_during

TRANSCRIPT = "conversation.item.input_audio_transcription."
STARTED, STOPPED, COMMITTED = (f"input_audio_buffer.{name}" for name in ("speech_started", "speech_stopped", "committed"))
MANUAL = {"type": "session.update", "session": {"audio": {"input": {"turn_detection": None}}}}
COMMIT = {"type": "input_audio_buffer.commit"}


def loud(ms: int) -> bytes:
    samples = 6000 * np.random.default_rng(ms).standard_normal(RATE * ms // 1000)
    return np.clip(samples, -32768, 32767).astype("<i2").tobytes()


def quiet(ms: int) -> bytes:
    return bytes(2 * RATE * ms // 1000)


def append(samples: bytes) -> dict[str, str]:
    return {"type": "input_audio_buffer.append", "audio": b64encode(samples).decode()}


class Client:
    """The connection of a client, and the speech of the server. Items wait until the client lets them go on."""

    def __init__(self, most_bytes: int = 25 << 20, memory: SessionMemory | None = None) -> None:
        self.sent = asyncio.Queue[bytes | WebSocketError | None]()
        self.events = list[dict[str, Any]]()
        self.items = list[_Item]()
        self.may_go_on = asyncio.Semaphore(0)
        self.refusal: ApiError | None = None
        self.most_bytes = most_bytes
        self.num_open = 0  # items whose texts are being made
        self.hold: Callable[[int], None] = lambda _: None
        self.memory = memory or SessionMemory()
        self.talk = _Talk(self, self, None, Share(self.memory, "key"))  # type: ignore[arg-type]

    def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            self.sent.put_nowait(json.dumps(event).encode())

    async def send_text(self, text: bytes) -> None:
        self.events.append(json.loads(text))

    async def texts_of_client(self, hold: Callable[[int], None]) -> AsyncGenerator[bytes, None]:
        self.hold = hold
        while (text := await self.sent.get()) is not None:
            if isinstance(text, WebSocketError):
                raise text
            yield text

    async def check(self, session: object) -> None: ...

    def texts(self, given: Any) -> AsyncGenerator[Any, None]:
        return self._texts_of(given) if isinstance(given, _Item) else self.texts_of_client(given)

    async def _texts_of(self, item: _Item) -> AsyncGenerator[tuple[str, None], None]:
        self.num_open += 1
        try:
            if self.refusal is not None:
                raise self.refusal
            await self.may_go_on.acquire()
            self.items.append(item)
            yield " text", None
        finally:
            self.num_open -= 1

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Return the event of this kind that is the `count`th, once it has come."""
        for _ in range(10_000):
            found = [event for event in self.events if event["type"] == kind]
            if len(found) >= count:
                return found[count - 1]
            await asyncio.sleep(0)
        raise AssertionError(f"no {kind} among {self.kinds}")

    @property
    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events]


async def settled() -> None:
    for _ in range(500):
        await asyncio.sleep(0)


def test_one_append_with_several_turns_has_the_times_of_small_ones() -> None:
    audio = quiet(500) + loud(500) + quiet(3000) + loud(1000) + quiet(2000) + loud(800) + quiet(1500)

    async def found(step_ms: int) -> list[tuple[str, int]]:
        client = Client()
        client.may_go_on = asyncio.Semaphore(100)
        step = len(quiet(step_ms))
        client.send(*(append(audio[at : at + step]) for at in range(0, len(audio), step)))
        client.sent.put_nowait(WebSocketError(CloseCode.GOING_AWAY, ""))
        with pytest.raises(WebSocketError):
            await client.talk.serve()
        assert client.kinds.count(f"{TRANSCRIPT}completed") == 3 and "error" not in client.kinds
        key = {STARTED: "audio_start_ms", STOPPED: "audio_end_ms"}
        times = [(kind := event["type"], event[key[kind]]) for event in client.events if event["type"] in key]
        spoken = [len(item.samples) // 48 for item in client.items]
        assert spoken == [end - begin for (_, begin), (_, end) in zip(times[::2], times[1::2], strict=True)]
        assert client.memory.num_bytes == 0
        return times

    whole = asyncio.run(found(100_000))
    assert whole == asyncio.run(found(100)) == asyncio.run(found(4000))
    assert [at for _, at in whole] == pytest.approx([200, 1500, 3700, 5500, 6700, 8300], abs=60)


def test_speech_from_the_first_sample_is_whole() -> None:
    async def run() -> None:
        client = Client()
        client.may_go_on = asyncio.Semaphore(100)
        audio = loud(1000) + quiet(2000)
        client.send(*(append(audio[at : at + 4800]) for at in range(0, len(audio), 4800)))
        client.sent.put_nowait(WebSocketError(CloseCode.GOING_AWAY, ""))
        with pytest.raises(WebSocketError):
            await client.talk.serve()
        assert [event.get("audio_start_ms", event.get("audio_end_ms")) for event in client.events if "speech_" in event["type"]] == [
            0,
            1500,
        ]
        assert client.items[0].samples == audio[: len(quiet(1500))]

    asyncio.run(run())


def test_a_very_short_turn_is_an_item() -> None:
    async def run() -> None:
        client = Client()
        client.may_go_on = asyncio.Semaphore(100)
        turns = {"type": "server_vad", "prefix_padding_ms": 0, "silence_duration_ms": 0}
        client.send({"type": "session.update", "session": {"audio": {"input": {"turn_detection": turns}}}})
        client.send(append(loud(60) + quiet(3000) + loud(1000) + quiet(1000)))
        client.sent.put_nowait(WebSocketError(CloseCode.GOING_AWAY, ""))
        with pytest.raises(WebSocketError):
            await client.talk.serve()
        assert "error" not in client.kinds and client.kinds.count(f"{TRANSCRIPT}completed") == 2

    asyncio.run(run())


def test_a_full_queue_holds_up_the_client_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "MOST_ITEMS", 2)

    async def run() -> None:
        client = Client()
        client.send(MANUAL)
        for ms in range(200, 207):
            client.send(append(loud(ms)), COMMIT)
        serving = asyncio.create_task(client.talk.serve())
        await settled()
        assert client.kinds.count(COMMITTED) == 4, "one is transcribed, two wait, and one waits for its place"
        assert not client.sent.empty()
        for _ in range(7):
            client.may_go_on.release()
        await client.until(f"{TRANSCRIPT}completed", 7)
        assert [len(item.samples) // 48 for item in client.items] == [*range(200, 207)] and "error" not in client.kinds
        client.sent.put_nowait(None)
        await serving

    asyncio.run(run())


def test_audio_waits_until_items_have_given_back_their_bytes() -> None:
    async def run() -> None:
        client = Client(most_bytes=len(quiet(1000)))
        client.send(MANUAL, append(loud(900)), COMMIT, append(loud(800)), append(quiet(300)))
        serving = asyncio.create_task(client.talk.serve())
        await settled()
        assert "error" not in client.kinds and client.sent.qsize() == 1
        client.may_go_on.release()
        error = await client.until("error")
        assert error["error"]["code"] == "input_audio_buffer_full", "800 and 300 ms are too much in any case"
        client.sent.put_nowait(None)
        await serving

    asyncio.run(run())


def test_memory_that_others_hold_is_an_error_to_be_retried() -> None:
    async def run() -> None:
        client = Client(memory=SessionMemory(most_of_owner=len(quiet(1000))))
        other = Share(client.memory, "key")
        other.hold(len(quiet(500)))
        client.send(MANUAL, append(quiet(600)))
        serving = asyncio.create_task(client.talk.serve())
        error = (await client.until("error"))["error"]
        assert (error["code"], error["type"]) == ("audio_memory_full", "rate_limit_error")
        other.hold(0)
        client.send(append(loud(600)), COMMIT)
        client.may_go_on.release()
        await client.until(f"{TRANSCRIPT}completed")
        assert len(client.items[0].samples) == len(quiet(600)) and client.memory.num_bytes == 0
        client.hold(len(quiet(900)))
        assert client.memory.num_bytes == len(quiet(900)), "an incomplete message counts"
        with pytest.raises(WebSocketError) as closed:
            client.hold(len(quiet(1100)))
        assert closed.value.code is CloseCode.TRY_AGAIN
        client.sent.put_nowait(None)
        await serving
        assert client.memory.num_bytes == 0

    asyncio.run(run())


def test_a_key_that_has_used_its_rates_fails_the_item_only() -> None:
    async def run() -> None:
        client = Client()
        client.refusal = ApiError(RATE_LIMITED, "the key has used its 1 requests per minute; retry in 60 s")
        client.send(MANUAL, append(loud(200)), COMMIT)
        serving = asyncio.create_task(client.talk.serve())
        failed = await client.until(f"{TRANSCRIPT}failed")
        assert failed["error"]["code"] == "rate_limit_exceeded"
        client.refusal = None
        client.send(append(loud(200)), COMMIT)
        client.may_go_on.release()
        await client.until(f"{TRANSCRIPT}completed")
        client.sent.put_nowait(None)
        await serving

    asyncio.run(run())


def test_a_key_that_is_gone_ends_the_session_of_a_silent_client() -> None:
    async def run() -> None:
        client = Client()
        client.refusal = ApiError(INVALID_API_KEY, "the API key is no longer valid")
        client.send(MANUAL, append(loud(200)), COMMIT)
        with pytest.raises(WebSocketError) as closed:
            await client.talk.serve()
        assert (closed.value.code, closed.value.reason) == (CloseCode.POLICY, "the API key is no longer valid")
        assert client.memory.num_bytes == 0

    asyncio.run(run())


def test_the_end_waits_for_the_transcripts_of_what_was_committed() -> None:
    async def run() -> None:
        client = Client()
        client.send(MANUAL, append(loud(200)), COMMIT, append(loud(300)), COMMIT)
        client.sent.put_nowait(WebSocketError(CloseCode.GOING_AWAY, "the server stops"))
        serving = asyncio.create_task(client.talk.serve())
        await client.until(COMMITTED, 2)
        await settled()
        assert not serving.done()
        client.may_go_on.release()
        client.may_go_on.release()
        with pytest.raises(WebSocketError, match="the server stops"):
            await serving
        assert client.kinds.count(f"{TRANSCRIPT}completed") == 2

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_item_at_once() -> None:
    async def run() -> None:
        client = Client()
        client.send(MANUAL, append(loud(200)), COMMIT)
        serving = asyncio.create_task(client.talk.serve())
        await client.until(COMMITTED)
        await settled()
        assert client.num_open == 1
        client.sent.put_nowait(None)
        await serving
        assert client.num_open == 0 and client.memory.num_bytes == 0

    asyncio.run(run())


def test_a_message_of_many_values_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(text: bytes) -> object:
        raise AssertionError("decoded")

    monkeypatch.setattr(realtime.msgspec.json, "decode", decode)
    many = b'{"type":"x","a":[' + b"[]," * 300_000 + b"[]]}"
    with pytest.raises(ApiError, match="more than 24576 objects, lists, names and texts"):
        asyncio.run(_event_of(many))
    with pytest.raises(ApiError, match="nests deeper"):
        asyncio.run(_event_of(b"[" * 100 + b"]" * 100))


def test_other_tasks_run_while_a_large_message_is_scanned() -> None:
    text = json.dumps(append(quiet(10_000))).encode()

    async def run() -> None:
        assert (await _event_of(text))["type"] == "input_audio_buffer.append"

    assert turns_during(run()) >= len(text) // (64 << 10)


@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
def test_a_session_may_name_its_model_later(serve: Callable[..., Any]) -> None:
    """The official client connects with `intent=transcription`, and names the model in the first update."""
    server = serve(initial=[ModelSpec(name, name) for name in ("null", "other")])
    client = server.openai()
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        assert connection.recv().type == "session.created"
        connection.send(MANUAL)
        assert connection.recv().type == "session.updated"
        audio = {"input": {"transcription": {"model": "other"}}}
        connection.send({"type": "session.update", "session": {"type": "transcription", "audio": audio}})
        assert connection.recv().error.code == "not_a_speech_model"
        connection.send(append(quiet(200)))
        connection.send(COMMIT)
        while (event := connection.recv()).type != f"{TRANSCRIPT}failed":
            pass
        assert event.error.code == "missing_field" and "null, other" in event.error.message
    with pytest.raises(InvalidStatus), client.realtime.connect(model="other"):
        pass
