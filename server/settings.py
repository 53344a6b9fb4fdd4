"""The settings of the front process. `deploy/settings.py` builds them from the command line, the environment and the configuration file."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit


class SettingsError(ValueError):
    """Raised for a setting with which the server refuses to start."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server. The constructor raises SettingsError if a setting has a value that cannot be used, or if the server would
    serve other machines without keys and `insecure` is not set."""

    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None  # URL to which traces of requests are sent; None: they are not sent
    keep_requests: Path | None = None  # file to which requests and answers are appended; None: they are not stored
    keep_requests_of: tuple[str, ...] = ("model=*",)  # the requests to store, by model or key; an administrator may change the choice

    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False  # serve other machines without keys
    proxy_networks: tuple[str, ...] = ()  # networks of proxies whose headers X-Forwarded-For and X-Forwarded-Proto are trusted
    root_path: str | None = None  # prefix that a proxy leaves in front of all paths

    api_keys: tuple[str, ...] = ()  # keys of clients
    api_key_file: Path | None = None  # file with further keys of clients, one a line, read again when it changes
    admin_keys: tuple[str, ...] = ()  # keys of administrators
    admin_key_file: Path | None = None  # file with further keys of administrators
    open_metrics: bool = False  # serve /metrics and /load without a key
    allowed_hosts: tuple[str, ...] = ()  # further Host values accepted while no keys are set
    cors_origins: tuple[str, ...] = ()  # origins whose web pages may send requests

    kv_events: str | None = None  # ZMQ address at which changes of prefix caches are published; None: they are not published
    kv_events_replay: str | None = None  # ZMQ address at which routers ask for past changes again
    kv_events_name: str | None = None  # name of this replica in the topics of these messages; None: its address
    ingress_key: str | None = None  # key with which an ingress may give requests their open values (`open_values.py`); None: nobody may
    peer_secret_file: Path | None = None  # the secret of servers that give each other pages of their caches; None: no pages are exchanged
    peer_rate_bytes: int = 256 << 20  # bytes per second at which pages arrive from other servers
    peer_patience_s: float = 2.0  # how long a request waits for pages of its prompt, in addition to the time of computing them

    stage_secret_file: Path | None = None  # the secret that this server shares with `relaxserve stage` on other machines
    model_root: Path = Path("models")  # folder below which the administration may load models
    allow_hub: bool = False  # whether the administration may download models from the hub
    publish: tuple[str, ...] = ()  # models that browsers may download and run
    state_file: Path | None = None  # stores the loaded models, which a restart loads again
    mcp_servers: tuple[str, ...] = ()  # MCP servers whose tools /v1/responses may call, as NAME=URL
    image_hosts: tuple[str, ...] = ()  # hosts from which images of requests are fetched; empty: images must be data: URLs
    audio_hosts: tuple[str, ...] = ()  # hosts from which audio of requests is fetched; empty: URLs of audio must be data: URLs
    memory_limit_bytes: int | None = None  # limit on the memory of all models together; None: each worker decides how much it uses
    default_kv_cache_bytes: int | None = None  # bytes of the KV cache for loads that do not set them

    strict: bool = False  # refuse unknown fields instead of reporting them
    keep_agent_hashes: bool = False  # show the model the hash that Claude Code puts into each request, which defeats the prefix cache
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    max_connections: int = 4096
    max_choices: int = 128  # limit on the number of prompts times `n` in one request
    max_inputs: int = 2048  # limit on the texts of one embedding request
    max_schema_bytes: int = 64 << 10
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_queued_requests: int = 256  # limit on the sequences (choices of requests) of a model that wait, in addition to those in its batch
    max_queued_tokens: int = 1 << 20  # limit on prompt tokens that are admitted and not yet prefilled, per model
    max_key_constraints: int = 64  # limit on the different constraints of the running and waiting requests of a key, per model
    response_store_bytes: int = 64 << 20  # total size of responses stored for later requests; 0: store none
    response_store_s: float = 86400.0  # time for which responses are stored after their last use
    batch_dir: Path | None = None  # folder of uploaded files and of batches; None: neither is offered
    batch_store_bytes: int = 1 << 30  # limit on the total size of uploaded files; 0: offer neither files nor batches
    batch_store_s: float = 2592000.0  # time for which files that batches write are kept
    max_file_bytes: int = 200 << 20  # largest uploaded file
    max_audio_bytes: int = 25 << 20  # largest audio file of a transcription, or of a recording that is fetched
    max_audio_s: float = 3600.0  # longest audio of a transcription, or of a recording in a message
    max_images: int = 64  # limit on the images of one request
    max_image_pixels: int = 40_000_000  # limit on the pixels of an image, checked before it is decoded
    max_image_bytes: int = 20 << 20  # largest file of an image that is fetched
    max_held_image_bytes: int = 1 << 30  # bytes of pixels that the requests of a model may hold before further images are refused
    max_recordings: int = 64  # limit on the recordings in the messages of one request
    # bytes of samples that the requests of a model may hold before further recordings are refused; all transcriptions together have the
    # same limit
    max_held_audio_bytes: int = 1 << 30
    max_timeout_s: float = 3600.0  # longest deadline that a request may set

    mcp_timeout_s: float = 60.0  # longest time for a request to an MCP server
    image_fetch_s: float = 10.0  # longest time for fetching an image
    audio_fetch_s: float = 10.0  # longest time for fetching audio

    header_timeout_s: float = 10.0  # longest time from the first byte of a request to the end of its headers
    body_timeout_s: float = 30.0  # longest time for the whole body to arrive
    write_timeout_s: float = 60.0  # longest time for which a client may read nothing while the buffer to it is full
    keep_alive_s: float = 75.0
    heartbeat_s: float = 10.0  # seconds between comment lines on a stream that sends nothing else
    lame_duck_s: float = 0.0  # time after SIGTERM for which the server reports that it is not ready, but accepts requests
    drain_s: float = 30.0  # time for running requests after a signal to stop
    stall_s: float = 15.0  # seconds of silence after which a worker that has work is replaced, unless it is busy with a long step

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port is {self.port}; expected 0 to 65535")
        for name in (field.name for field in fields(self) if field.name.startswith("max_") or field.name.endswith(("_s", "_bytes"))):
            _require_size(name, getattr(self, name))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        if self.otlp_traces_endpoint is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.otlp_traces_endpoint):
            raise SettingsError(f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}; expected http://HOST:4318/v1/traces")
        if self.root_path is not None and not re.fullmatch(r"(/[\w.~-]+)+/?", self.root_path, re.ASCII):
            raise SettingsError(f"root_path is {self.root_path!r}; expected a path such as /llm")
        for network in self.proxy_networks:
            _require_network(network)
        for name in ("kv_events", "kv_events_replay"):
            if (address := getattr(self, name)) is not None and not re.fullmatch(ZMQ_ADDRESS, address, re.ASCII):
                raise SettingsError(f"{name} is {address!r:.200}; expected tcp://*:5557, tcp://ADDRESS:PORT or ipc://PATH")
        if self.kv_events_name is not None and not re.fullmatch(r"[^\s@]{1,200}", self.kv_events_name):
            raise SettingsError(f"kv_events_name is {self.kv_events_name!r:.200}; expected a name without @, such as 10.0.0.7:8000")
        if self.ingress_key is not None and not re.fullmatch(r"[!-~]{16,200}", self.ingress_key):
            raise SettingsError("ingress_key has another form; expected 16 to 200 printable ASCII characters without spaces")
        for name, (form, expectation) in FORMS.items():
            for value in getattr(self, name):
                if not re.fullmatch(form, value, re.ASCII):
                    raise SettingsError(f"{name} has {value!r}; expected {expectation}")
        for entry in self.mcp_servers:
            _require_place(entry)
        if not (self.has_api_keys or self.insecure or is_loopback(self.host)):
            raise SettingsError(
                f"host is {self.host!r}, which other machines can reach, and no API key is set; "
                "set a key (or a key file), bind to 127.0.0.1, or set insecure"
            )

    @property
    def has_api_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None


KEEP = r"(model|key)=[A-Za-z0-9._:/*?\[\]!-]{1,128}"
KEPT = "model=PATTERN or key=PATTERN, in which * stands for any text"
ZMQ_ADDRESS = r"tcp://(\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\*|\d{1,5})|ipc://.+"
CHOICES = {"log_level": ("debug", "info", "warning", "error"), "log_format": ("text", "json")}

HOSTS = (
    r"\*|(private\+)?(\*\.)?[\w-][\w.-]*(:\d{1,5})?",
    "HOST, *.HOST, HOST:PORT or *, such as images.example.com, or private+HOST for a host on a private network",
)

# The formats of values, and how an error message describes them. Most of the values are compared with values of requests, so a value in
# another format would never match.
FORMS = {
    "keep_requests_of": (KEEP, KEPT),
    "allowed_hosts": (r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", "a name without scheme and port, or an IPv6 address in brackets"),
    "cors_origins": (
        r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+",
        "an origin as browsers send it: https://HOST or http://HOST:PORT, or * for all",
    ),
    "image_hosts": HOSTS,
    "audio_hosts": HOSTS,
    "mcp_servers": (
        r"[\w.-]{1,64}=(private\+)?https?://(?![^/?#]*@)[\w.-]+(:\d{1,5})?([/?][!-~]*)?|"
        r"[\w.-]{1,64}=(private\+)?https?://\[[0-9A-Fa-f:.]+\](:\d{1,5})?([/?][!-~]*)?",
        "NAME=URL, such as docs=https://example.com/mcp, or NAME=private+URL for a server on a private network",
    ),
}

MAY_BE_0 = (
    "response_store_bytes",
    "batch_store_bytes",
    "max_stop_strings",
    "max_queued_requests",
    "max_queued_tokens",
    "lame_duck_s",
    "drain_s",
)


def _require_size(name: str, value: float | None) -> None:
    """Raise SettingsError unless a count, a size or a time is positive and finite. None is allowed for all names, and 0 for those in
    MAY_BE_0."""
    if value is not None and not (0 < value < math.inf or (value == 0 and name in MAY_BE_0)):
        raise SettingsError(f"{name} is {value}; expected {'0 or more' if name in MAY_BE_0 else 'more than 0'}, and finite")


def _require_network(text: str) -> None:
    """Raise SettingsError unless a text is an address or a network."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise SettingsError(f"proxy_networks has {text!r}; expected an address or a network, such as 10.0.0.7 or 10.0.0.0/8") from None


def _require_place(entry: str) -> None:
    """Raise SettingsError unless brackets in the URL of an MCP server hold an address, and its port is a valid port number."""
    try:
        _ = urlsplit(entry.partition("=")[2]).port
    except ValueError as error:
        raise SettingsError(f"mcp_servers has {entry!r}: {error}") from None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host. Any name other than `localhost` counts as reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
