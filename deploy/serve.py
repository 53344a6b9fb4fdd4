"""Assemble the server and run it: settings -> registry of supervised workers -> application -> uvicorn."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from compiler.machine.target import NAMED
from deploy.bound import bound
from deploy.cache import Kept, kept
from deploy.library import Downloads
from deploy.listening import listen
from deploy.model_loading.locate import identity_of, weigh
from deploy.model_loading.tokenizer import load_tokenizer
from deploy.publication import Wanted
from runtime import generated_code
from runtime.extras import installing
from runtime.launch import command
from runtime.own_folder import OwnFolder
from runtime.sealed import is_shared
from server.fleet.cache_events import CacheEvents
from server.http.auth import Guard
from server.interfaces import LoadError, ProgressCallback
from server.load_settings import LoadSettings
from server.messages import ErrorCode, Load, Peering
from server.models.model import Footprint, FormEstimate
from server.models.publications import Publications
from server.models.registry import Registry
from server.models.state import ModelSpec, exclusive, read_state, require_writable
from server.pauses import collect_in_small_portions, switch_often
from server.secret_file import read_secret
from server.settings import ServerSettings, SettingsError
from server.signal_names import describe_status
from server.workers.care import Care
from server.workers.supervisor import Supervisor

if TYPE_CHECKING:
    from deploy.traces import Tracer
    from server.http.server import Server

WORKER = command("deploy.worker")
RESERVED_FILES = 96  # file descriptors for the front's own files, connections not yet accepted, a few per model, and restarts of workers
PARTNERS = {  # setting -> the setting without which it has no effect
    "keep_requests_of": "keep_requests",
    "kv_events_name": "kv_events",
    "kv_events_replay": "kv_events",
    "peer_patience_s": "peer_secret_file",
    "peer_rate_bytes": "peer_secret_file",
}
LEAST_CONNECTIONS = 16  # connections that are accepted even if fewer descriptors remain for them

log = logging.getLogger(__name__)

# Called with the registry and the address once the server accepts requests; returns whether to keep running.
Greet = Callable[[Registry, str], Awaitable[bool]]


def make_worker(
    spec: ModelSpec, progress: ProgressCallback, settings: ServerSettings, hub_token: str | None = None, events: CacheEvents | None = None
) -> Supervisor:
    """Return a supervisor for the worker of a model. The worker is not started yet. The settings that concern workers become part of the
    load. `events`: publishes the changes of the worker's prefix cache; None: changes are not reported. Raise SettingsError if a file with a
    secret cannot be used."""
    file = settings.stage_secret_file if spec.stages else None
    secret = "" if file is None else read_secret(file, "stage_secret_file")
    load = msgspec.structs.replace(
        load_of(spec, hub_token),
        stage_secret=secret,
        peers=peering_of(settings),
        logs_cache=events is not None,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    cache = None if events is None else events.source_of(spec.name)
    return Supervisor(WORKER, load, progress=progress, care=Care(stall_s=settings.stall_s), cache=cache)


def _require_partners(settings: ServerSettings) -> None:
    """Raise SettingsError if a setting is set, but not the setting without which it has no effect (PARTNERS)."""
    for name, partner in PARTNERS.items():
        if getattr(settings, partner) is None and getattr(settings, name) != getattr(ServerSettings(), name):
            raise SettingsError(f"{name} is set and {partner} is not; set both, or leave {name} out")


def peering_of(settings: ServerSettings) -> Peering | None:
    """Return how pages of prefix caches are exchanged with other servers, or None if they are not. Raise SettingsError if the file with the
    servers' secret cannot be used."""
    if settings.peer_secret_file is None:
        return None
    return Peering(read_secret(settings.peer_secret_file, "peer_secret_file"), settings.peer_rate_bytes, settings.peer_patience_s)


def load_of(spec: ModelSpec, hub_token: str | None = None) -> Load:
    """Return the message that loads a model, with the fields that it shares with the spec."""
    return Load(**{name: getattr(spec, name) for name in LoadSettings.__struct_fields__}, hub_token=hub_token)


async def preflight(spec: ModelSpec, hub_token: str | None = None) -> Footprint:
    """Plan a load in a separate process, because compiling in this process would delay the streams of other models. Return the memory that
    it would take. Raise LoadError if the model cannot be loaded, or has stages."""
    if spec.stages:
        raise LoadError(
            ErrorCode.INVALID_VALUE, f"{spec.name} has stages, whose memory is planned when they load; leave dry_run or stages out"
        )
    answer = await _answer_of("the planner", command("deploy.inspection"), load_of(spec, hub_token))
    parts = ("weights_bytes", "arena_bytes", "kv_cache_bytes", "page_bytes", "cache_hit", "graphs_bytes")
    return Footprint(**{name: answer[name] for name in parts})


async def compare_forms(source: str, hub_token: str | None = None) -> list[FormEstimate]:
    """Return the formats of a model's weights with their sizes and errors. A separate process compares them and reads some weights. Raise
    LoadError if the files cannot be read."""
    answer = await _answer_of("the comparison of formats", command("deploy.forms"), Load(source, source, hub_token=hub_token))
    return msgspec.convert(answer["forms"], list[FormEstimate])


async def export(spec: ModelSpec, folder: Path, hub_token: str | None = None) -> None:
    """Write the files that browsers need to run a model to `folder`. A separate process does the work. Raise LoadError if the model cannot
    be exported."""
    wanted = Wanted(load_of(spec, hub_token), spec.defaults)
    await _answer_of("the export", (*command("deploy.publication"), str(folder)), wanted)


async def _answer_of(who: str, command: tuple[str, ...], asked: msgspec.Struct) -> dict[str, Any]:
    """Start a process, send it a message and return its answer. Raise LoadError if the process refuses the load, or ends with another
    status than 0; `who` names the process in the message. If the caller is cancelled, or this process ends, the process is killed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*bound(command), stdin=pipe, stdout=pipe)
    try:
        output, _ = await process.communicate(msgspec.json.encode(asked))
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):  # the process has just ended
            process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise LoadError(ErrorCode.LOAD_FAILED, f"{who} ended early ({describe_status(process.returncode)})")
    answer: dict[str, Any] = msgspec.json.decode(output)
    if "code" in answer:
        raise LoadError(ErrorCode(answer["code"]), answer["message"], answer.get("required", 0), answer.get("free", 0))
    return answer


def serve(settings: ServerSettings, models: Sequence[ModelSpec], greet: Greet, hub_token: str | None = None) -> bool:
    """Serve until stopped. Return False if `greet` ended the server, else True. Invalid settings raise an error before a model loads. An
    error of `greet` stops the server and is raised. This function also raises the process's limit on open files, lets its threads switch
    often, filters its warnings, and sets TOKENIZERS_PARALLELISM in its environment."""
    Guard(settings)  # reads the keys
    if settings.stage_secret_file is not None:
        read_secret(settings.stage_secret_file, "stage_secret_file")
    _require_partners(settings)
    switch_often()
    ignore_field_warnings()
    # the texts of one request are encoded on one core, so that running streams keep the other cores
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warn_of_open_names(settings)
    settings, cache = with_descriptors(settings), kept()
    if settings.batch_dir is None and cache is not None and settings.port:
        settings = replace(settings, batch_dir=cache.folder / "batches" / str(settings.port))  # a restarted server uses the same folder
    tracer = tracer_of(settings)
    with (
        nullcontext() if settings.state_file is None else own_state(settings.state_file),
        listen(settings.host, settings.port) as listener,
        cache_events(settings, listener) as events,
    ):
        return asyncio.run(_serve(settings, models, cache, listener, greet, hub_token, tracer, events))


def ignore_field_warnings() -> None:
    """Ignore pydantic's warnings about fields that FastAPI makes. FastAPI ignores them itself, but another thread may meanwhile restore the
    filters of warnings, which all threads share, because the application is built on a separate thread."""
    warnings.filterwarnings("ignore", r"The '\w+' attribute with value .* was provided to the `Field\(\)` function", UserWarning)


def warn_of_open_names(settings: ServerSettings) -> None:
    """Warn if a proxy offers this server to other machines (`allowed_hosts`) and no API key is set, unless the setting `insecure` allows
    that. Requests through the proxy come from this machine, so the server refuses none of them."""
    if settings.allowed_hosts and not (settings.has_api_keys or settings.insecure):
        closed = settings.admin_keys or settings.admin_key_file is not None
        also = "" if closed else ", and load, unload and stop them"
        names = ", ".join(settings.allowed_hosts)
        text = "no API key is set: everybody who reaches this server as %s may use its models%s; set api_key_file and admin_key_file"
        log.warning(text, names, also)


def warn_of_absent_names(registry: Registry) -> None:
    """Warn of names to publish if no model of that name loads at the start. The name may be misspelt."""
    for name in sorted({*registry.settings.publish} - {model.spec.name for model in registry.models()}):
        log.warning("publish names %r; no model of that name is loaded from the start", name)


def with_descriptors(settings: ServerSettings) -> ServerSettings:
    """Raise the limit on open files as far as possible. Return the settings with max_connections lowered so that enough descriptors remain
    for other files, but not below LEAST_CONNECTIONS, and warn if it is lowered. Without free descriptors, a worker that died could not be
    restarted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the hard limit is above what the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = settings.max_connections if soft == resource.RLIM_INFINITY else max(LEAST_CONNECTIONS, soft - RESERVED_FILES)
    if most >= settings.max_connections:
        return settings
    text = (
        "max_connections is %d, and %d open files are allowed: only %d connections are accepted; raise the limit (ulimit -n, LimitNOFILE=)"
    )
    log.warning(text, settings.max_connections, soft, most)
    return replace(settings, max_connections=most)


@contextmanager
def own_state(path: Path) -> Generator[None]:
    """Hold the lock of the state file for this server. Raise StateError if another server holds the lock, or if the file cannot be read or
    written."""
    read_state(path)
    with exclusive(path):
        require_writable(path)
        yield


async def _serve(
    settings: ServerSettings,
    models: Sequence[ModelSpec],
    cache: Kept | None,
    listener: socket.socket,
    greet: Greet,
    hub_token: str | None,
    tracer: Tracer | None,
    events: CacheEvents | None,
) -> bool:
    """Load the models and serve until stopped. Return False if `greet` ended the server, else True; raise an error of `greet`. `cache` is
    None if the cache is disabled, `tracer` if requests are not traced, and `events` if changes of prefix caches are not published."""
    registry = Registry(
        settings,
        partial(make_worker, settings=settings, hub_token=hub_token, events=events),
        partial(load_tokenizer, hub_token=hub_token),
        is_cached=lambda spec: cache is not None and cache.has_loaded(spec.source),
        identify=partial(identity_of, hub_token=hub_token),
        preflight=partial(preflight, hub_token=hub_token),
        compare_forms=partial(compare_forms, hub_token=hub_token),
        cache=cache,
        weigh=weigh,
        library=Downloads(hub_token),
        initial=models,
        targets=("host", *NAMED),
        publications=publications(settings, cache, hub_token),
    )
    await registry.open()  # the workers start while this process imports and builds the application
    warn_of_absent_names(registry)
    try:
        server = await asyncio.to_thread(http_server, settings, registry, tracer)
    except BaseException:
        await registry.close()
        raise

    async def welcome() -> bool:
        while not server.started:
            await asyncio.sleep(0.01)
        collect_in_small_portions()
        goes_on = False
        try:
            goes_on = await greet(registry, url_of(listener))
        finally:  # an error of `greet` stops the server, too
            server.should_exit = server.should_exit or not goes_on
        generated_code.keep()
        return goes_on

    welcoming = asyncio.create_task(welcome())
    await server.serve(sockets=[listener])
    if not welcoming.done():
        welcoming.cancel()  # the server was stopped before all models were loaded
        return True
    return welcoming.result()


def http_server(settings: ServerSettings, registry: Registry, tracer: Tracer | None) -> Server:
    """Build the application and the HTTP server around it. Their packages are imported only here, while the workers start, because the
    import takes about as long as the start of a worker."""
    from server.app import create_app
    from server.http.server import Server

    app = create_app(settings, registry, () if tracer is None else (tracer,))
    return Server(app, settings, registry)


def publications(settings: ServerSettings, cache: Kept | None, hub_token: str | None) -> Publications:
    """Return the exports of the models that the settings publish. They are written below the cache, or below a new temporary folder if the
    cache is disabled or shared with other machines."""
    if not settings.publish:
        return Publications()
    if cache is None or is_shared():  # servers on machines that share a volume may not see each other's locks
        folder = OwnFolder(Path(tempfile.gettempdir()), "relaxserve-web-").path
    else:
        folder = cache.folder / "web"
    return Publications(settings.publish, partial(export, hub_token=hub_token), folder)


def tracer_of(settings: ServerSettings) -> Tracer | None:
    """Return a tracer if the settings name an endpoint for traces. OpenTelemetry is imported only in this case."""
    if settings.otlp_traces_endpoint is None:
        return None
    from deploy.traces import Tracer

    return Tracer(settings.otlp_traces_endpoint)


@contextmanager
def cache_events(settings: ServerSettings, listener: socket.socket) -> Generator[CacheEvents | None]:
    """Yield the publisher of the events of prefix caches, or None if the settings name no address for them. ZMQ is imported only if there
    is an address. Close the sockets at the end. Raise SettingsError if the address cannot be used, or if ZMQ is not installed."""
    if settings.kv_events is None:
        yield None
        return
    try:
        import zmq

        from server.fleet.sockets import EventSockets
    except ImportError as error:
        raise SettingsError(f"kv_events needs pyzmq, which is not installed; {installing('fleet')}") from error
    name = settings.kv_events_name or url_of(listener).removeprefix("http://")
    events = CacheEvents(name, lambda topic, number, batch: sockets.send(topic, number, batch))
    try:
        sockets = EventSockets(settings.kv_events, settings.kv_events_replay, events.replay)
    except zmq.ZMQError as error:
        also = "" if settings.kv_events_replay is None else f" or {settings.kv_events_replay}"
        raise SettingsError(
            f"kv_events cannot be published at {settings.kv_events}{also}: {zmq.strerror(error.errno or 0)}; choose another"
        ) from error
    log.info("cache events of %s are published at %s; they have the tokens of all prompts", name, sockets.address)
    try:
        yield events
    finally:
        sockets.close()


def url_of(listener: socket.socket) -> str:
    """Return the URL by which a client on this machine reaches the server."""
    host, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
