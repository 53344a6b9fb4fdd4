"""What the front process can be told. The command line builds it; nothing in the server reads the environment."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path


class SettingsError(ValueError):
    """A setting whose value the server refuses to start with."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    log_level: str = "info"
    log_format: str = "text"
    otlp_traces_endpoint: str | None = None  # where traces of requests are sent; None: nowhere

    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False  # serve other machines without keys

    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None  # one key per line, read again when it changes
    admin_keys: tuple[str, ...] = ()
    admin_key_file: Path | None = None
    open_metrics: bool = False  # /metrics without a key
    allowed_hosts: tuple[str, ...] = ()  # further Host values accepted while no keys are set
    cors_origins: tuple[str, ...] = ()

    model_root: Path = Path("models")
    allow_hub: bool = False
    publish: tuple[str, ...] = ()  # models that browsers may download and run
    state_file: Path | None = None  # the set of loaded models, to come back after a restart
    memory_limit_bytes: int | None = None  # of all models together; None leaves it to each worker
    default_kv_cache_bytes: int | None = None  # for a load that does not say

    strict: bool = False  # refuse unknown fields instead of reporting them
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    max_connections: int = 4096
    max_choices: int = 128  # prompts x n of one request
    max_inputs: int = 2048  # texts of one embedding request
    max_schema_bytes: int = 64 << 10
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_queued_requests: int = 256  # per model, beyond those its batch holds
    max_queued_tokens: int = 1 << 20  # prompt tokens admitted and not yet prefilled, per model
    response_store_bytes: int = 64 << 20  # of responses that are kept for later requests; 0: none
    response_store_s: float = 86400.0  # after their last use
    max_timeout_s: float = 3600.0  # the longest deadline a request may ask for

    header_timeout_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_timeout_s: float = 30.0  # for the whole body
    write_timeout_s: float = 60.0  # how long a client may leave a full buffer unread
    keep_alive_s: float = 75.0
    heartbeat_s: float = 10.0  # comment lines on a silent stream
    drain_s: float = 30.0  # for running requests when the server is told to stop
    stall_s: float = 20.0  # without a word from a worker that has work: longer than its longest step

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
        for name, (form, expectation) in FORMS.items():
            for value in getattr(self, name):
                if not re.fullmatch(form, value, re.ASCII):
                    raise SettingsError(f"{name} has {value!r}; expected {expectation}")
        if not (self.has_api_keys or self.insecure or is_loopback(self.host)):
            raise SettingsError(
                f"host is {self.host!r}, which other machines can reach, and no API key is set; "
                "set a key (or a key file), bind to 127.0.0.1, or say insecure"
            )

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None


CHOICES = {"log_level": ("debug", "info", "warning", "error"), "log_format": ("text", "json")}

# What headers are compared with, letter by letter: of another form it would never be met.
FORMS = {
    "allowed_hosts": (r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", "a name without scheme and port, or an IPv6 address in brackets"),
    "cors_origins": (
        r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+",
        "an origin as browsers send it: https://HOST or http://HOST:PORT, or * for all",
    ),
}

MAY_BE_0 = ("response_store_bytes", "max_stop_strings", "max_queued_requests", "max_queued_tokens", "drain_s")


def _require_size(name: str, value: float | None) -> None:
    """Of what is counted or lasts; None is left to others."""
    if value is not None and not (0 < value < math.inf or (value == 0 and name in MAY_BE_0)):
        raise SettingsError(f"{name} is {value}; expected {'0 or more' if name in MAY_BE_0 else 'more than 0'}, and no infinity")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
