"""Let Dynamo's worker use a server as its engine. The worker registers the model, passes requests to the engine and its answers to Dynamo's
frontend, and ends the engine when the worker drains.

Dynamo sends token ids, and cuts stop texts and calls of tools from the answer by itself. If a worker is lost, Dynamo's frontend sends the
request to another one, with the tokens generated so far appended to the prompt. The token at a position depends only on the seed and the
tokens before it, so the answer is the same as if no worker had been lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError

import aiohttp
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import CannotConnect, Disconnected, InvalidArgument, Unknown
from dynamo.runtime import Context

from deploy.client import ServerFault
from deploy.dynamo.answer import BrokenOff, chunk_of, message_of
from deploy.dynamo.card import write_card
from deploy.dynamo.entry import Entry, entry_in, no_relaxserve
from deploy.dynamo.figures import Figures, figures_in
from deploy.dynamo.options import TYPES, Options, parse
from deploy.dynamo.request import Refused, body_of
from deploy.dynamo.server import FoundServer, GivenUp, OwnServer, Server, until_ready
from deploy.replicas.events import Events
from deploy.replicas.process import ServerEnded
from deploy.replicas.session import new_session
from deploy.settings import KEY_VARIABLE
from server.settings import SettingsError

log = logging.getLogger(__name__)

PATH = "/inference/v1/generate"
RANK = 0  # number of the only rank: a server has one worker per model, which Dynamo counts as a rank
WATCH_S = 1.0  # interval at which the worker checks the server and tells Dynamo its load
LIST_EVERY = 10  # every tenth check also asks whether the server still has the model; not each, because the server logs that request
DRAIN_POLL_S = 0.1  # interval at which a worker that ends checks whether requests are still running
MOST_FAILED = 3  # consecutive checks that find the server silent or without the model, after which it counts as lost
BREAK_OFF_S = 5.0  # longest time for telling Dynamo that requests are broken off
STOP_S = 60.0  # longest wait for the end of a server that has no requests; then it is killed


class Engine(LLMEngine):
    """The engine of one worker: a server with one model. Dynamo calls the methods that LLMEngine declares."""

    def __init__(self, name: str, server: Server, card: Path) -> None:
        """`name`: the name of the model. `card`: the folder with the files that Dynamo's frontend needs."""
        self._name = name
        self._server = server
        self._card = card
        self._client: aiohttp.ClientSession | None = None
        self._publisher: Any = None  # Dynamo's publisher of load
        self._watching: asyncio.Task[None] | None = None
        # The keys are contexts, not ids, because a request that Dynamo sends again has the same id as before.
        self._running: dict[Context, asyncio.Task[aiohttp.ClientResponse]] = {}
        self._must_end = False  # a signal has arrived
        self.has_given_up = False  # the signal arrived before the server was ready
        self.failure: SettingsError | ServerFault | None = None  # why the worker ends by itself

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Engine, WorkerConfig]:
        raise NotImplementedError("`run` makes the engine, with options that it has parsed")

    async def start(self, worker_id: int) -> EngineConfig:
        """Wait until the server is ready, describe its model to Dynamo, and begin to watch the server. Raise GivenUp if `end` is called
        before the server is ready. If the server cannot be used, raise another error, and set `failure` to the reason."""
        del worker_id
        try:
            await until_ready(self._server, lambda: self._must_end)
            entry = await self._entry()
            found = await self._read_figures()
        except GivenUp:
            self.has_given_up = True
            raise
        except (ServerEnded, OSError, SettingsError) as error:
            self.failure = _fault_of(error, self._server.url)
            raise
        self._client = new_session()
        self._watching = asyncio.create_task(self._watch())
        return EngineConfig(
            model=str(self._card),
            served_model_name=self._name,
            model_aliases=[*entry.aliases],
            llm=LlmRegistration(
                context_length=entry.max_model_len,
                kv_cache_block_size=found.block_size or None,
                total_kv_blocks=found.num_blocks or None,
            ),
        )

    def end(self, *_: object) -> None:
        """End the wait for the server. Dynamo itself obeys a signal only once the engine has started."""
        self._must_end = True

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        """Pass a request to the server, and yield the chunks of its answer. If the request fails, raise an error of Dynamo; the class of
        the error tells Dynamo whether another worker may serve the request. If the client has stopped the request, the last chunk says that
        the request is cancelled. When this generator ends, the connection to the server is closed."""
        assert self._client is not None, "start comes first"
        if self.failure is not None:
            raise CannotConnect(str(self.failure))
        normalize_request_token_ids(request)
        try:
            body = body_of(request, context.id(), self._name)
        except Refused as error:
            raise InvalidArgument(str(error)) from None
        key = self._server.access_key
        headers = {"authorization": f"Bearer {key}"} if key else None
        opening = asyncio.ensure_future(self._client.post(self._server.url + PATH, json=body, headers=headers, allow_redirects=False))
        self._running[context] = opening
        try:
            async with aclosing(_chunks(await opening)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (asyncio.CancelledError, aiohttp.ClientError, BrokenOff) as error:
            if self.failure is not None:
                raise Disconnected(str(self.failure)) from None
            elif context.is_stopped():
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
            elif isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                raise CannotConnect(f"the server at {self._server.url} takes no connection: {error}") from None
            elif isinstance(error, aiohttp.ClientError):
                raise Disconnected(f"the server broke off the answer: {type(error).__name__}") from None
            elif isinstance(error, BrokenOff):
                raise Unknown(str(error)) from None
            else:
                raise
        finally:
            del self._running[context]
            _close(opening)

    async def abort(self, context: Context) -> None:
        """Break off the requests that have the id of `context` and that Dynamo has stopped. Dynamo also aborts an attempt that has failed,
        maybe after it has sent the request again under the same id; Dynamo has not stopped the new attempt, so that one goes on."""
        for running, opening in self._running.items():
            if running.id() == context.id() and running.is_stopped():
                _close(opening)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return the source from which Dynamo gets the changes of the prefix cache, or [] if the server publishes none."""
        events = self._server.events
        return [] if events is None else [ZmqSource(events, dp_rank=RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(0)

    async def cleanup(self) -> None:
        """Wait until the running requests have ended, and stop the server. If the server is lost, break off the requests instead. Dynamo
        calls this after the worker has left the registry and Dynamo's grace period has passed."""
        while self._running and self.failure is None:
            await asyncio.sleep(DRAIN_POLL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(BREAK_OFF_S):
                await self._break_off()
        if self._watching is not None:
            self._watching.cancel()
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self._server.stop, STOP_S)

    async def _break_off(self) -> None:
        """Break off the running requests, so that Dynamo continues them elsewhere, and wait until they have ended."""
        for opening in self._running.values():
            _close(opening)
        while self._running:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _entry(self) -> Entry:
        """Return the server's description of the model. Raise SettingsError if the worker cannot serve it, and OSError as `ask` does."""
        return entry_in(await asyncio.to_thread(self._server.ask, "/v1/models"), self._name, self._server.url)

    async def _read_figures(self) -> Figures:
        """Return the figures of the model's cache. Raise SettingsError if they cannot be read from the answer, and OSError as `ask`
        does."""
        page = await asyncio.to_thread(self._server.ask, "/metrics")
        try:
            return figures_in(page.decode(), self._name)
        except (ValueError, KeyError) as error:
            raise no_relaxserve(self._server.url, f"its figures at /metrics cannot be read, {error!r}") from error

    async def _watch(self) -> None:
        """Wait until the server is lost, or cannot be watched. Then record the reason and end the worker, which leaves the registry."""
        try:
            why = await self._until_lost()
        except Exception as error:  # end the worker whatever has failed, because nothing watches the server any more
            log.exception("the server at %s is not watched any more", self._server.url)
            why = f"the server at {self._server.url} cannot be watched: {error!r}"
        self.failure = ServerFault(why)
        os.kill(os.getpid(), signal.SIGTERM)

    async def _until_lost(self) -> str:
        """Tell Dynamo the load of the server until the server is lost: it has ended, is silent, or lacks the model. Return the reason in
        words."""
        num_failed = num_looks = 0
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await asyncio.to_thread(self._server.require_answer)
                found = await self._read_figures()
                num_looks += 1
                if num_failed or not found.num_blocks or num_looks % LIST_EVERY == 0:
                    await self._entry()
            except (ServerEnded, OSError, SettingsError) as error:
                num_failed += 1
                if isinstance(error, ServerEnded) or num_failed == MOST_FAILED:
                    return str(error) if isinstance(error, SettingsError) else f"the server at {self._server.url} is lost: {error}"
                continue
            num_failed = 0
            if self._publisher is not None:
                self._publisher.publish(RANK, ComponentSnapshot(found.num_used, found.num_blocks, found.usage, RANK, found.hit_rate))


def _fault_of(error: ServerEnded | OSError | SettingsError, url: str) -> SettingsError | ServerFault:
    """Return the error with which a worker that cannot start ends. `error` is what `Engine.start` caught."""
    match error:
        case SettingsError():
            return error
        case HTTPError(code=401 | 403):
            return SettingsError(f"the server at {url} refuses the key, {error}; set {KEY_VARIABLE} to one of its keys")
        case HTTPError(code=status) if status < 500:
            return no_relaxserve(url, f"it answers with {error}")
        case _:
            return ServerFault(f"the server at {url} cannot be used: {error}")


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncGenerator[GenerateChunk, None]:
    """Yield the chunks of an answer of the server. Raise an error of Dynamo if the server has refused the request, BrokenOff if the stream
    reports an error, and an error of aiohttp if the stream ends before its last event."""
    if answer.status != 200:
        why = message_of(_json(await answer.read())) or f"the server answers with status {answer.status}"
        match answer.status:
            case 401 | 403 | 404 | 429 | 503:  # the server lacks the key or the model, or is busy: another worker may serve the request
                raise CannotConnect(why)  # Dynamo 1.6 sends the request to another worker only after this error
            case status if 400 <= status < 500:
                raise InvalidArgument(why)
            case _:
                raise Unknown(why)
    events, is_whole = Events(answer.content_type), False
    async for data in answer.content.iter_any():
        for event in events.push(data):
            if (chunk := chunk_of(event)) is not None:
                yield cast("GenerateChunk", chunk)
            is_whole |= event.startswith(b"data: [DONE]")
    if not is_whole:
        raise aiohttp.ServerDisconnectedError("before the end of the stream")


def _json(content: bytes) -> object:
    """Return the value of a JSON text, or None for other texts."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _close(opening: asyncio.Task[aiohttp.ClientResponse]) -> None:
    """Break the connection of a request, so that the server stops computing. If there is no connection yet, make none; if it is closed, do
    nothing."""
    if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def run(argv: list[str]) -> None:
    """Serve a model until SIGTERM or SIGINT, or until its server is lost. A model without a chat template serves only completions, unless
    the options name the endpoints. Raise SettingsError or LoadError if the model cannot be served, and ServerFault if the server cannot be
    used or is lost."""
    import uvloop

    options = parse(argv)
    card = write_card(options.spec.source)
    if not card.has_template and options.runtime.endpoint_types == TYPES:
        options.runtime.endpoint_types = "completions"
    config = WorkerConfig.from_runtime_config(
        options.runtime, str(card.folder), options.spec.name, component=options.component, endpoint=options.endpoint
    )
    server = _server_of(options)
    engine = Engine(options.spec.name, server, card.folder)
    # Dynamo's signal handlers also call the handlers that were installed before them. Python's own handlers would break off the drain.
    before = [(number, signal.signal(number, engine.end)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        uvloop.run(Worker(engine, config).run())
    except Exception:
        if engine.failure is None and not engine.has_given_up:
            raise
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        server.stop(STOP_S)
    if engine.failure is not None:
        raise engine.failure


def _server_of(options: Options) -> Server:
    """Return the server that the options describe. If they name no URL, start the server. Raise SettingsError if its settings are wrong."""
    if options.url is None:
        return OwnServer(options.entry, options.settings)
    return FoundServer(options.url, options.key, options.events)
