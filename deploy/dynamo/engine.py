"""A server as an engine of Dynamo's worker, which registers the model, passes requests and answers, and ends the engine when it drains.

Dynamo sends token ids, and cuts stop texts and calls of tools from the answer by itself. If a worker is lost, Dynamo's frontend sends a
request to another one with the tokens so far behind the prompt. The token at a position depends on the seed and the tokens before it, so
the answer is the same as without the loss.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import aiohttp
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import CannotConnect, Disconnected, InvalidArgument, Unknown, WorkerUnavailable
from dynamo.runtime import Context

from deploy.client import ServerFault
from deploy.dynamo.answer import BrokenOff, chunk_of, message_of
from deploy.dynamo.card import write_card
from deploy.dynamo.figures import Figures, figures_in
from deploy.dynamo.options import TYPES, Options, parse
from deploy.dynamo.request import Refused, body_of
from deploy.dynamo.server import FoundServer, OwnServer, Server, until_ready
from deploy.replicas.events import Events
from deploy.replicas.process import ServerEnded
from deploy.replicas.session import new_session
from server.settings import SettingsError

PATH = "/inference/v1/generate"
RANK = 0  # a server has one worker per model, which Dynamo counts as one rank
WATCH_S = 1.0  # interval at which Dynamo hears of the load
DRAIN_POLL_S = 0.1
MOST_SILENT = 3  # questions without an answer, after which the server counts as lost


class Engine(LLMEngine):
    """The engine of one worker."""

    def __init__(self, name: str, server: Server, card: Path) -> None:
        """`name`: of the model. `card`: the folder with the files that Dynamo's frontend needs."""
        self._name = name
        self._server = server
        self._card = card
        self._client: aiohttp.ClientSession | None = None
        self._publisher: Any = None  # Dynamo's publisher of load
        self._watching: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[aiohttp.ClientResponse]] = {}  # by the id of the request
        self.failure: SettingsError | ServerFault | None = None  # why the worker ends by itself

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Engine, WorkerConfig]:
        raise NotImplementedError("`run` makes the engine, with options that it has parsed")

    async def start(self, worker_id: int) -> EngineConfig:
        del worker_id
        try:
            await until_ready(self._server)
            entry = await self._entry()
            found = await self._read_figures()
        except (ServerEnded, OSError) as error:
            self.failure = ServerFault(f"the server at {self._server.url} cannot be used: {error}")
            raise
        except SettingsError as error:
            self.failure = error
            raise
        self._client = new_session()
        self._watching = asyncio.create_task(self._watch())
        return EngineConfig(
            model=str(self._card),
            served_model_name=self._name,
            model_aliases=list(entry["aliases"]),
            llm=LlmRegistration(
                context_length=entry["max_model_len"],
                kv_cache_block_size=found.block_size or None,
                total_kv_blocks=found.num_blocks or None,
            ),
        )

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateChunk, None]:
        assert self._client is not None, "start comes first"
        normalize_request_token_ids(request)
        try:
            body = body_of(request, context.id(), self._name)
        except Refused as error:
            raise InvalidArgument(str(error)) from None
        key = self._server.access_key
        headers = {"authorization": f"Bearer {key}"} if key else None
        opening = asyncio.ensure_future(self._client.post(self._server.url + PATH, json=body, headers=headers))
        self._running[context.id()] = opening
        try:
            async with aclosing(_chunks(await opening)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (asyncio.CancelledError, aiohttp.ClientError, BrokenOff) as error:
            if context.is_stopped():
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
            if self._running.get(context.id()) is opening:
                del self._running[context.id()]
            _close(opening)

    async def abort(self, context: Context) -> None:
        if (opening := self._running.get(context.id())) is not None:
            _close(opening)

    async def kv_event_sources(self) -> list[KvEventSource]:
        events = self._server.events
        return [] if events is None else [ZmqSource(events, dp_rank=RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(0)

    async def cleanup(self) -> None:
        """Wait until the running requests have ended, and stop the server. Dynamo calls this when the worker has left the registry for as
        long as its grace period."""
        while self._running and self.failure is None:
            await asyncio.sleep(DRAIN_POLL_S)
        if self._watching is not None:
            self._watching.cancel()
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self._server.stop)

    async def _entry(self) -> dict[str, Any]:
        """Return how the server describes the model."""
        server = self._server
        listed = json.loads(await asyncio.to_thread(server.ask, "/v1/models"))["data"]
        entry = next((entry for entry in listed if entry["id"] == self._name), None)
        if entry is None or "max_model_len" not in entry:
            names = ", ".join(entry["id"] for entry in listed) or "none"
            raise SettingsError(f"the server at {server.url} has no model {self._name!r}; it has: {names}. Name one as MODEL=NAME")
        if not entry["generates"]:
            raise SettingsError(f"the model {self._name} generates no text; expected one that does")
        return entry

    async def _read_figures(self) -> Figures:
        return figures_in((await asyncio.to_thread(self._server.ask, "/metrics")).decode(), self._name)

    async def _watch(self) -> None:
        """Tell Dynamo the load of the server. If the server is lost, leave the registry, and end the worker."""
        num_silent = 0
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._server.require()
                found = await self._read_figures()
                num_silent = 0
            except (ServerEnded, OSError) as error:
                num_silent += 1
                if isinstance(error, OSError) and num_silent < MOST_SILENT:
                    continue
                self.failure = ServerFault(f"the server at {self._server.url} is lost: {error}")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._publisher is not None:
                self._publisher.publish(RANK, ComponentSnapshot(found.num_used, found.num_blocks, found.usage, RANK, found.hit_rate))


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncGenerator[GenerateChunk, None]:
    """Yield the chunks of an answer of the server. Raise an error of Dynamo if the server has refused the request."""
    if answer.status != 200:
        why = message_of(_json(await answer.read())) or f"the server answers with status {answer.status}"
        match answer.status:
            case 429 | 503:
                raise WorkerUnavailable(why)
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
    try:
        return json.loads(content)
    except ValueError:
        return None


def _close(opening: asyncio.Task[aiohttp.ClientResponse]) -> None:
    """Break the connection, so that the server stops computing."""
    if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def run(argv: list[str]) -> None:
    """Serve a model until SIGTERM, or until its server is lost. Raise SettingsError or LoadError if it cannot be served, and ServerFault if
    the server is lost."""
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
    try:
        uvloop.run(Worker(engine, config).run())
    except Exception:
        if engine.failure is None:
            raise
    finally:
        server.stop()
    if engine.failure is not None:
        raise engine.failure


def _server_of(options: Options) -> Server:
    if options.url is None:
        return OwnServer(options.entry, options.settings)
    return FoundServer(options.url, options.key, options.events)
