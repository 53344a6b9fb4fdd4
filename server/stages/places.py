"""Read where the stages of a model run: in processes of this machine, or on hosts that run `relaxserve stage`."""

from __future__ import annotations

from dataclasses import dataclass

from server.messages import HEAD, LOCAL

DEFAULT_PORT = 7070


class PlaceError(ValueError):
    """Raised for a place that cannot be read, or for a list of places at which the stages of a model cannot run."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage runs."""

    name: str  # the place as it was written
    host: str | None = None  # None: a process of this machine
    port: int = DEFAULT_PORT  # without a meaning if `host` is None


def parse_place(text: str) -> Place:
    """Parse `local`, `head`, `HOST`, `HOST:PORT` or `[HOST]:PORT`. Raise PlaceError for any other text."""
    if text in (LOCAL, HEAD):
        return Place(text)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else str(DEFAULT_PORT) if not rest else ""
    else:
        host, colon, port = text.partition(":")
        port = port if colon else str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise PlaceError(f"{text!r:.100} is no place of a stage; expected {LOCAL}, HOST or HOST:PORT")
    return Place(text, host, int(port))


def parse_places(text: str) -> tuple[str, ...]:
    """Parse a number of processes of this machine, or places separated by commas, and return all places. If the last one is another
    machine, HEAD is added: this server's worker then computes no layers. Raise PlaceError for any other text, and for fewer than two
    stages."""
    if text.isdecimal() and int(text) == 0:
        raise PlaceError("stages is 0; expected at least two stages: leave it out to compute all layers in one process")
    if text.isdecimal():
        places = (LOCAL,) * min(int(text), 1 << 10)
    else:
        found = [parse_place(part.strip()) for part in text.split(",")]
        places = (*(place.name for place in found), *(() if found[-1].host is None else (HEAD,)))
    require_places(places)
    return places


def require_places(places: tuple[str, ...]) -> None:
    """Raise PlaceError unless these are places at which the stages of a model can run."""
    for place in places:
        parse_place(place)
    shown = f"stages is {','.join(places)!r:.200}"
    if len(places) < 2:
        raise PlaceError(f"{shown}, one process; expected at least two stages: leave it out to compute all layers in one process")
    if places[-1] not in (LOCAL, HEAD):
        text = f"the last stage samples, in this server's own worker: end the list with {LOCAL}, or with {HEAD} if it is to have no layers"
        raise PlaceError(f"{shown}; {text}")
    if HEAD in places[:-1]:
        raise PlaceError(f"{shown}; {HEAD} is the last stage, without layers: name it last, or give the port of a host with this name")
