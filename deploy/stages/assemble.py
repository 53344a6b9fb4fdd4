"""Assemble the stages of a model: start them, tell each its layers, and agree with them on pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar

from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.splitting import require_splittable
from deploy.machine import free_memory
from deploy.model_loading.files import Opened
from deploy.model_loading.fingerprint import fingerprint_of
from deploy.model_loading.known import Asked, Progress, refusals
from deploy.model_loading.plan import Plan, Planned
from deploy.model_loading.stages import advance
from deploy.stages.division import loads_of_stages
from deploy.stages.starting import Peer, start_stage
from runtime.device.registry import CPU
from server.interfaces import LoadError
from server.messages import HEAD, LOCAL, ErrorCode, Load, LoadFailed, StageReport, Working
from server.messages import Progress as ProgressMessage
from server.stages import messages
from server.stages.link import StageLost
from server.stages.messages import Greeting, Loaded, Reserve, StageMessage
from server.stages.places import PlaceError, parse_place, require_places
from server.stages.relay import Relay

SILENCE_S = 60.0  # seconds after which a loading stage that sends no report is given up; stages report every half second while they load

log = logging.getLogger(__name__)

HERE = (LOCAL, HEAD)  # names of stages on the server's machine

M = TypeVar("M", bound=StageMessage)


@refusals()
def assemble(begun: Asked) -> Planned:
    """Start all stages but the last one, which is this process. When the others are ready to run, return the plan of this process, with a
    report of each stage. Raise LoadError if a stage cannot be started or loaded."""
    opened = advance(begun, Opened)
    require_splittable(opened.files.config, len(begun.load.stages) - begun.load.stages.count(HEAD))
    if opened.files.is_embedder:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{opened.files.path.name} is an embedding model, which has no stages: leave stages out")
    places = [parse_place(name) for name in opened.load.stages[:-1]]
    peers: list[Peer] = []
    try:
        for number, place in enumerate(places, 1):
            peers.append(start_stage(place, opened.load.stage_secret, number))
            peers[-1].link.limit_silence(SILENCE_S)
        found = _together(opened, peers)
        for peer in peers:
            peer.link.limit_silence(None)
        return found
    except BaseException as error:
        for peer in peers:
            peer.end()
        if isinstance(error, StageLost):
            raise LoadError(ErrorCode.LOAD_FAILED, f"{error}, while it was loading; see its log") from error
        raise


def require_supported(load: Load) -> None:
    """Raise LoadError if a setting does not go with stages."""
    try:
        require_places(load.stages)
    except PlaceError as error:
        raise LoadError(ErrorCode.INVALID_VALUE, str(error)) from error
    if any(place not in HERE for place in load.stages) and not load.stage_secret:
        text = (
            "stages names other machines, and no stage secret is set: set stage_secret_file to the file that their `relaxserve stage` has"
        )
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    refused = {
        f"device is {load.device!r}": load.device != CPU,
        "label is set": load.label,
        f"quantize is {load.quantize!r}, which measures the whole model": WeightFormat.parse(load.quantize).budget > 0,
    }
    if reason := next((reason for reason, applies in refused.items() if applies), ""):
        raise LoadError(ErrorCode.INVALID_VALUE, f"{reason}, and stages is set: they are not supported together; leave one of them out")


def _together(opened: Opened, peers: Sequence[Peer]) -> Planned:
    """Load the other stages, and plan the last one, which is this process: send each of the others its layers, agree on the number of
    pages with all of them, and wait until the others have loaded. Raise LoadError if a stage runs another version or cannot load its
    layers."""
    load = opened.load
    greetings = [_awaited(peer, Greeting, opened.progress) for peer in peers]
    for peer, greeting in zip(peers, greetings, strict=True):
        if greeting.version != version("relaxserve"):
            text = (
                f"{peer.link.place} runs relaxserve {greeting.version}, and this server {version('relaxserve')}; install the same version"
            )
            raise LoadError(ErrorCode.LOAD_FAILED, text)
    machines = [peer.place.host or LOCAL for peer in peers] + [LOCAL]
    free_bytes = {machine: greeting.free_bytes for machine, greeting in zip(machines, greetings, strict=False)} | {LOCAL: free_memory()}
    loads = loads_of_stages(load, opened.files, machines, free_bytes)
    for peer, own in zip(peers, loads[:-1], strict=True):
        peer.link.send(own)
    known = advance(replace(opened, load=loads[-1]), Planned)  # the other stages compile meanwhile
    plans = [_awaited(peer, messages.Planned, opened.progress) for peer in peers]
    num_pages = _agreed(known, peers, plans)
    for peer in peers:
        peer.link.send(Reserve(num_pages))
    loaded = [_awaited(peer, Loaded, opened.progress) for peer in peers]
    plan = known.plan.with_pages(num_pages)
    reports = tuple(
        StageReport(place, *_ends(own), part.weights_bytes, part.arena_bytes, part.kv_cache_bytes, part.page_bytes)
        for place, own, part in zip(load.stages, loads, (*loaded, _loaded(plan)), strict=True)
    )
    shares_cores = all(place in HERE for place in load.stages)
    for report in reports:
        layers = f"layers {report.first_layer} to {report.end_layer - 1}" if report.first_layer < report.end_layer else "no layers"
        log.info("%s: %s at %s", load.name, layers, report.place)
    relay = Relay([peer.link for peer in peers], shares_cores=shares_cores)
    return replace(known, plan=plan, relay=relay, reports=reports)


def _loaded(plan: Plan) -> Loaded:
    return Loaded(plan.weights_bytes, plan.arena_bytes, plan.kv_cache_bytes, tuple(group.page_bytes for group in plan.groups))


def _ends(load: Load) -> tuple[int, int]:
    assert load.layers is not None, load
    return load.layers


def _agreed(known: Planned, peers: Sequence[Peer], plans: Sequence[messages.Planned]) -> tuple[int, ...]:
    """Return the number of pages of each cache group for which every stage has room. Raise LoadError if a stage would compute something
    else than this process."""
    found = fingerprint_of(known), known.mode.max_context
    for peer, plan in zip(peers, plans, strict=True):
        if (plan.fingerprint, plan.max_context) != found:
            text = (
                f"{peer.link.place} would compute {plan.fingerprint} with {plan.max_context} tokens of context, and this server"
                f" {found[0]} with {found[1]}: install the same version, copy the same files, and set numerics=portable if the CPUs differ"
            )
            raise LoadError(ErrorCode.LOAD_REFUSED, text)
    own = tuple(group.num_pages for group in known.plan.groups)
    return tuple(map(min, *(plan.num_pages for plan in plans), own))


def _awaited(peer: Peer, kind: type[M], progress: Progress) -> M:
    """Wait for a message of this kind from a stage that loads, and pass on its progress. Raise LoadError if the stage cannot load its
    layers or sends another message, and StageLost if it is gone."""
    while True:
        message, _ = peer.link.receive()
        match message:
            case Working():
                continue
            case ProgressMessage():
                progress(message.stage, message.fraction)
            case LoadFailed():
                text = f"{peer.link.place} cannot load its layers with its part of the memory: {message.message}"
                # other models on this server can make room for a stage on this machine only
                sizes = (message.required_bytes, message.free_bytes) if peer.process is not None else ()
                raise LoadError(message.code, text, *sizes)
            case _ if isinstance(message, kind):
                return message
            case _:
                raise LoadError(ErrorCode.LOAD_FAILED, f"{peer.link.place} sent {type(message).__name__}, expected {kind.__name__}")
