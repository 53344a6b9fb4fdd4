"""The options of a worker: the model and its server, and those that all workers of Dynamo have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint

from deploy.settings import KEY_VARIABLE, checked, model_entry, read_document
from server.models.state import ModelSpec
from server.settings import SettingsError

PLACE = "backend.generate"  # component and endpoint of a worker, unless --endpoint names others
TYPES = "chat,completions"  # Dynamo's default for the endpoints that its frontend offers for the model


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed options of a worker."""

    spec: ModelSpec  # the model
    entry: str | dict[str, Any]  # the model as in the configuration file of a server
    settings: Mapping[str, Any]  # settings of the server that the worker starts
    url: str | None  # URL of a server that runs already; None: the worker starts one
    events: str | None  # address at which the server at `url` publishes its cache events
    key: str | None  # API key of the server at `url`
    runtime: DynamoRuntimeConfig
    component: str  # Dynamo's name of the group of workers to which this one belongs
    endpoint: str  # Dynamo's name of what the component serves


def parse(argv: Sequence[str]) -> Options:
    """Read the options. Raise SettingsError if the value of one is wrong. Like all programs that use argparse, exit at --help and at an
    unknown option."""
    parser = argparse.ArgumentParser("relaxserve dynamo", description="Serve a model as a worker of NVIDIA Dynamo.", allow_abbrev=False)
    own = parser.add_argument_group("options of relaxserve")
    own.add_argument("model", nargs="?", metavar="MODEL", help="folder, .gguf file, hub id or 'demo', maybe with =NAME")
    own.add_argument("--config", type=Path, metavar="FILE", help="settings of the server, or its model, as for `relaxserve serve`")
    own.add_argument("--url", help=f"use the server at this address, which has the model; {KEY_VARIABLE} is its key")
    own.add_argument("--kv-events", metavar="ADDRESS", help="with --url: where the server publishes its cache events")
    DynamoRuntimeArgGroup().add_arguments(parser)
    found = parser.parse_args(argv)
    if found.url is not None and found.config is not None:
        raise SettingsError(f"--url is {found.url} and --config is {found.config}; a server that runs has its settings: leave one out")
    if found.url is None and found.kv_events is not None:
        raise SettingsError(f"--kv-events is {found.kv_events} without --url; the worker's own server needs none: leave it out")
    if found.url is not None:
        _require_address(found.url)
    key = os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{KEY_VARIABLE} cannot be sent in an HTTP header; expected a key in printable ASCII")
    entry, settings = _model_of(found.model, found.config)
    runtime = DynamoRuntimeConfig.from_cli_args(found)
    try:
        runtime.validate()
        runtime.namespace, component, endpoint = parse_endpoint(runtime.endpoint or f"dyn://{runtime.namespace}.{PLACE}")
    except ValueError as error:
        raise SettingsError(str(error)) from error
    spec = model_entry(entry, "MODEL")
    return Options(spec, entry, settings, found.url, found.kv_events, key, runtime, component, endpoint)


def _require_address(url: str) -> None:
    """Raise SettingsError unless a URL is one of HTTP or HTTPS with a host, without a user, a query or a fragment."""
    with suppress(ValueError):  # urlsplit or `port` raises it for a URL that is wrong
        parts = urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and " " not in url and not (parts.query or parts.fragment or parts.username)
        if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise SettingsError(f"--url is {url!r}; expected http://HOST:PORT")


def _model_of(model: str | None, config: Path | None) -> tuple[str | dict[str, Any], Mapping[str, Any]]:
    """Return the entry of the worker's model, which either `model` or the configuration file names, and the other settings of the file.
    Raise SettingsError unless exactly one model is named, or if the file is wrong."""
    if config is None:
        if model is None:
            raise SettingsError("MODEL is missing; name a folder, a .gguf file, a hub id or 'demo'")
        return model, {}
    settings: dict[str, Any] = read_document(config)  # read only once, because the file may be a stream
    _, specs = checked(settings, config)  # raises an error that says what is wrong with the file
    entries = [*settings.pop("models", ()), *([] if model is None else [model])]
    if len(entries) != 1:
        names = ", ".join(spec.name for spec in specs) or "none"
        raise SettingsError(f"models in {config} are {names}, and MODEL is {model}; a worker serves one model: name it in one place")
    return entries[0], settings
