"""Gather settings: arguments take precedence over the environment, the environment over the file, the file over the defaults.

    --max-body-bytes 16M        RELAXSERVE_MAX_BODY_BYTES=16M        max_body_bytes: 16M

The table SETTINGS lists all settings with their group and meaning; options, variables and keys of the file are derived from this table.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from deploy import catalogue, demo
from runtime.files import at_home, regular
from runtime.flags import SWITCHES
from server.defaults import DefaultsError, read_values
from server.models.sources import GGUF, NO_UNICODE, is_hub_id, is_unicode, names_of, settled, without_host
from server.models.state import NAME, NAMED, ModelSpec
from server.settings import ServerSettings, SettingsError
from server.stages.places import PlaceError, parse_places, require_places
from server.text.dialects.registry import FORMATS

PREFIX = "RELAXSERVE_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
URL_VARIABLE, KEY_VARIABLE = f"{PREFIX}URL", f"{PREFIX}KEY"  # variables of the commands that talk to a running server

LISTEN, KEYS, MODELS, LIMITS, TIMES, LOGS, FLEET = "Address", "Keys", "Models", "Limits", "Times", "Logs and traces", "Fleets"


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table of settings."""

    name: str  # name of a field of ServerSettings
    group: str  # heading under which `relaxserve serve --help` lists the option
    meaning: str  # help text of the option
    in_arguments: bool = True  # false for secrets, which have no option, because other users of the machine can read a command line


SETTINGS = (
    Setting("host", LISTEN, "Address to listen on."),
    Setting("port", LISTEN, "Port; 0 takes a free one."),
    Setting("insecure", LISTEN, "Serve other machines without API keys."),
    Setting("proxy_networks", LISTEN, "Proxy whose X-Forwarded-For and -Proto name client and scheme; may be repeated."),
    Setting("root_path", LISTEN, "Prefix that a proxy leaves in front of all paths, such as /llm."),
    Setting("allowed_hosts", LISTEN, "Further Host header to accept while no API keys are set; may be repeated."),
    Setting("cors_origins", LISTEN, "Origin whose web pages may call the API; may be repeated."),
    Setting("api_keys", KEYS, "Keys of clients, separated by commas, with their groups and limits.", in_arguments=False),
    Setting("api_key_file", KEYS, "File with one API key per line, read again when it changes."),
    Setting("admin_keys", KEYS, "Keys of administrators, separated by commas.", in_arguments=False),
    Setting("admin_key_file", KEYS, "File with one key of an administrator per line, read again when it changes."),
    Setting("open_metrics", KEYS, "Let /metrics and /load be read without a key."),
    Setting("stage_secret_file", MODELS, "Secret of stages on other machines."),
    Setting("model_root", MODELS, "Folder below which /admin may load models."),
    Setting("allow_hub", MODELS, "Let /admin download models: by hub id, or by a name of `relaxserve ls --available`."),
    Setting("publish", MODELS, "Model that browsers may download and run at /web/MODEL/; may be repeated."),
    Setting("state_file", MODELS, "File with the set of loaded models, which the next start loads again."),
    Setting("mcp_servers", MODELS, "MCP server for /v1/responses, as NAME=URL; may be repeated."),
    Setting("image_hosts", MODELS, "Host from which images of requests may be fetched; may be repeated."),
    Setting("audio_hosts", MODELS, "Host from which audio of requests may be fetched; may be repeated."),
    Setting("memory_limit_bytes", MODELS, "Memory limit for all models together, such as 12G."),
    Setting("default_kv_cache_bytes", MODELS, "KV cache of models without kv_cache_bytes, such as 2G."),
    Setting("strict", LIMITS, "Refuse unknown fields instead of reporting them."),
    Setting("keep_agent_hashes", LIMITS, "Show the model the hash that Claude Code puts into each request."),
    Setting("max_body_bytes", LIMITS, "Largest request body."),
    Setting("max_header_bytes", LIMITS, "Largest size of request line and headers together."),
    Setting("max_connections", LIMITS, "Maximum number of connections."),
    Setting("max_choices", LIMITS, "Maximum number of prompts times n in a request."),
    Setting("max_inputs", LIMITS, "Maximum number of texts in an embedding request."),
    Setting("max_schema_bytes", LIMITS, "Largest JSON schema or grammar."),
    Setting("response_store_bytes", LIMITS, "Memory for stored responses, such as 64M; 0 stores none."),
    Setting("batch_dir", MODELS, "Folder of uploaded files and of batches, which a restart continues; by default in the cache."),
    Setting("batch_store_bytes", LIMITS, "Disk space for uploaded files, such as 1G; 0 offers neither files nor batches."),
    Setting("max_file_bytes", LIMITS, "Largest uploaded file."),
    Setting("max_audio_bytes", LIMITS, "Largest audio file, uploaded or fetched."),
    Setting("max_audio_s", TIMES, "Longest audio, transcribed or in a message."),
    Setting("max_images", LIMITS, "Most images in a request."),
    Setting("max_image_pixels", LIMITS, "Most pixels of an image."),
    Setting("max_image_bytes", LIMITS, "Largest file of an image that is fetched."),
    Setting("max_held_image_bytes", LIMITS, "Memory for the images of running and waiting requests, per model."),
    Setting("max_recordings", LIMITS, "Most recordings in the messages of a request."),
    Setting("max_held_audio_bytes", LIMITS, "Memory for the recordings of requests: in messages, per model, and of all transcriptions."),
    Setting("max_stop_strings", LIMITS, "Maximum number of stop strings in a request."),
    Setting("max_stop_chars", LIMITS, "Longest stop string."),
    Setting("max_queued_requests", LIMITS, "Maximum number of waiting sequences per model."),
    Setting("max_queued_tokens", LIMITS, "Maximum number of waiting prompt tokens per model."),
    Setting("max_key_constraints", LIMITS, "Most different schemas and grammars of a key at once, per model."),
    Setting("max_timeout_s", TIMES, "Longest timeout that a request may ask for."),
    Setting("mcp_timeout_s", TIMES, "Longest request to an MCP server."),
    Setting("image_fetch_s", TIMES, "Longest time for fetching an image."),
    Setting("audio_fetch_s", TIMES, "Longest time for fetching audio."),
    Setting("response_store_s", TIMES, "How long a response is stored after its last use."),
    Setting("batch_store_s", TIMES, "How long the files that a batch writes are kept."),
    Setting("header_timeout_s", TIMES, "Longest time from a request's first byte to the end of its headers."),
    Setting("body_timeout_s", TIMES, "Longest time for the arrival of a whole body."),
    Setting("write_timeout_s", TIMES, "How long a client may read nothing before its connection is closed."),
    Setting("keep_alive_s", TIMES, "Longest idle time of a connection."),
    Setting("heartbeat_s", TIMES, "Interval of comment lines in a stream without events."),
    Setting("lame_duck_s", TIMES, "How long a server that gets SIGTERM still accepts requests, while its probe of readiness fails."),
    Setting("drain_s", TIMES, "How long running requests may continue when the server stops."),
    Setting("stall_s", TIMES, "A worker that has work but reports nothing for this time is replaced, unless it is busy with a long step."),
    Setting("log_level", LOGS, "Least severity of log lines: debug, info, warning or error."),
    Setting("log_format", LOGS, "Format of the log: text or json."),
    Setting("keep_requests", LOGS, "File that stores requests and answers, for `relaxserve replay`."),
    Setting("keep_requests_of", LOGS, "What to store: model=NAME or key=NAME."),
    Setting("otlp_traces_endpoint", LOGS, "Address that traces of requests are sent to, as OTLP over HTTP."),
    Setting("kv_events", FLEET, "ZMQ address that publishes changes of the prefix caches, such as tcp://*:5557."),
    Setting("kv_events_replay", FLEET, "ZMQ address that sends changes again to routers that missed some, such as tcp://*:5558."),
    Setting("kv_events_name", FLEET, "Name of this replica in the topics of its events, such as 10.0.0.7:8000; by default its address."),
    Setting("ingress_key", FLEET, "Key with which an ingress decides ids, time and seed of answers.", in_arguments=False),
    Setting("peer_secret_file", FLEET, "Secret of the servers that give each other pages of their prefix caches."),
    Setting(
        "peer_rate_bytes", FLEET, "Bytes per second between these servers, such as 256M: pages that are faster computed are not taken."
    ),
    Setting("peer_patience_s", FLEET, "How much longer than computing a prompt a request waits for its pages."),
)

TYPES: dict[str, str] = {field.name: str(field.type) for field in fields(ServerSettings)}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(ServerSettings)}


def gather(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    config: Path | None = None,
    models: Iterable[str] = (),
) -> tuple[ServerSettings, list[ModelSpec]]:
    """Gather the settings and the models. An argument of None counts as not given. The file is `config`, or else the one that
    RELAXSERVE_CONFIG names, if any. If `models` is not empty, the models of the file are ignored. Raise SettingsError if a setting, a
    variable or a model is wrong."""
    links = service_links(environment)
    environment = {variable: text for variable, text in environment.items() if variable not in links}
    for variable in environment:
        if variable.startswith(PREFIX):
            _check_variable(variable)
    if config is None and (named := environment.get(CONFIG_VARIABLE)):
        config = Path(named)
    values, specs = read_config(config) if config is not None else ({}, [])
    for setting in SETTINGS:
        variable = PREFIX + setting.name.upper()
        if variable in environment:
            values[setting.name] = parse(setting.name, environment[variable], variable)
    for name, value in arguments.items():
        if value is not None:
            values[name] = parse(name, str(value), f"--{name.replace('_', '-')}") if isinstance(value, Path) else value
    specs = [model_spec(text) for text in models] or specs
    check_models(specs)
    return ServerSettings(**values), specs


_LINK = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINKED_PORT = re.compile(rf"{PREFIX}(\w+_)?PORT")


def service_links(environment: Mapping[str, str]) -> tuple[str, ...]:
    """List the variables that Kubernetes sets to tell a pod where Services are. For a Service named `relaxserve` or `relaxserve-...`, these
    variables have our prefix, but are not settings. RELAXSERVE_PORT is such a variable if its value is a URL, and a setting if it is a
    number."""
    return tuple(
        name
        for name, text in environment.items()
        if _LINK.fullmatch(name) or (_LINKED_PORT.fullmatch(name) and re.match(r"(tcp|udp|sctp)://", text))
    )


def check_models(specs: Iterable[ModelSpec]) -> None:
    """Raise SettingsError if a model's format of tool calls, name, alias or list of stages is not allowed. Also raise it if two models have
    the same name, since the second would be dropped silently, or share an alias, which would refer to the model loaded last."""
    sources: dict[str, str] = {}
    for spec in specs:
        if spec.tool_parser is not None and spec.tool_parser not in FORMATS:
            raise SettingsError(f"tool_parser of model {spec.name!r} is {spec.tool_parser!r:.40}; expected one of {', '.join(FORMATS)}")
        if spec.stages:
            try:
                require_places(spec.stages)
            except PlaceError as error:
                raise SettingsError(f"model {spec.name!r}: {error}") from error
        for name in dict.fromkeys((spec.name, *spec.aliases)):
            if not re.fullmatch(NAME, name):
                how, remedy = ("", "give one as PATH_OR_ID=NAME") if name == spec.name else (" by an alias", "choose another alias")
                raise SettingsError(f"model {spec.source!r} is called {name!r}{how}; expected {NAMED}; {remedy}")
            if name in sources:
                both = f"{sources[name]!r} and {spec.source!r}"
                remedy = "give one another name, as PATH_OR_ID=NAME" if name == spec.name else "choose another alias"
                raise SettingsError(f"models {both} are both called {name!r}; {remedy}")
            sources[name] = spec.source


# --- values ------------------------------------------------------------------------------------------------------------


def parse(name: str, text: str, where: str) -> Any:
    """Parse the value of a setting, according to the type of the setting or, for numbers of bytes, to its name. Raise SettingsError, whose
    message begins with `where`, the place of the value, if the text is no such value."""
    kind = TYPES[name].removesuffix(" | None")
    expected, read = _KINDS["bytes" if name.endswith("_bytes") else kind]
    try:
        return read(text)
    except (ValueError, OverflowError, RuntimeError):  # RuntimeError: a path in the home of a user that does not exist
        raise SettingsError(f"{where} is {_shown(text)}; expected {expected}") from None


def num_bytes(text: str) -> int:
    """Parse a size such as `64M`, `1.5GiB` or `1000000`. Units are powers of 1024. Raise ValueError for other texts, such as `0.5`, which
    was probably meant as a share, for a part of one byte, and for a number of more than 63 bits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(text)
    size = float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")
    if size >= 1 << 63 or 0 < size < 1 or (not match[2] and size % 1):
        raise ValueError(text)
    return round(size)


def num_bytes_or_share(text: str) -> int | float:
    """Parse a size, or a share of memory such as `50%`, which is returned as a number between 0 and 1. Raise ValueError for other texts,
    for 0%, and for 100% or more."""
    if (match := re.fullmatch(r"(\d{1,2}(?:\.\d+)?)\s*%", text.strip())) is None or not float(match[1]):
        return num_bytes(text)
    return float(match[1]) / 100


def _flag(text: str) -> bool:
    """Parse true or false, or the other words for them. Raise ValueError for other texts."""
    try:
        return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _path(text: str) -> Path:
    """Parse a path, in which `~` is replaced by the home folder. Raise ValueError if the text is empty or cannot be a path."""
    if not text:
        raise ValueError(text)
    return Path(_text(text)).expanduser()


def _text(text: str) -> str:
    """Return the text. Raise ValueError if the text has a zero byte, or is no Unicode, and so can be neither a path nor an address."""
    if "\0" in text:
        raise ValueError(text)
    text.encode()
    return text


def _key(key: object) -> str:
    """Return a key of the file for a message. YAML also reads keys that are no texts."""
    return key if isinstance(key, str) else _shown(key)


def _shown(value: object) -> str:
    """Return the beginning of a value for a message. Values of a file may contain themselves, by YAML's aliases, and Python does not write
    integers of more than 4300 digits."""
    try:
        return reprlib.repr(value) if isinstance(value, list | dict) else f"{value!r:.80}"
    except ValueError:
        return "an integer of thousands of digits"


_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "str": ("a text", _text),
    "int": ("a whole number", int),
    "float": ("a number of seconds", float),
    "bool": ("true or false", _flag),
    "Path": ("a path", _path),
    "bytes": ("a number of bytes, such as 1000000, 64M or 2G", num_bytes),
    "tuple[str, ...]": ("texts, separated by commas", lambda text: tuple(t.strip() for t in text.split(",") if t.strip())),
}


def _check_variable(variable: str) -> None:
    """Raise SettingsError for an unknown variable with our prefix: a misspelt setting would otherwise be ignored silently."""
    known = [PREFIX + s.name.upper() for s in SETTINGS] + [s.variable for s in SWITCHES] + [CONFIG_VARIABLE, URL_VARIABLE, KEY_VARIABLE]
    if variable not in known:
        raise SettingsError(f"the environment has {variable}, which is no setting{_nearest(variable, known)}; unset or correct it")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return a question for an error message with the known name that is most like an unknown one, or "" if none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (is {near[0]} meant?)" if near else ""


# --- the file ----------------------------------------------------------------------------------------------------------

SET_BY_THE_REGISTRY = ("memory_limit_bytes", "reserved_bytes", "kv_share", "presets")  # fields of a load that no file may set
MODEL_KEYS = tuple(name for name in ModelSpec.__struct_fields__ if name not in SET_BY_THE_REGISTRY)


_STREAM = re.compile(r"/dev/stdin|(/dev|/proc/self)/fd/\d+")  # a stream that the shell has opened, as for `--config <(...)`


class _Loader(yaml.SafeLoader):
    """A loader that refuses duplicate keys. YAML's own loader would silently use the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: list[str] = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(problem=f"{twice} occurs twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def read_config(path: Path) -> tuple[dict[str, Any], list[ModelSpec]]:
    """Read a configuration file: settings by name, and `models`, a list whose entries have a `source` and any field of ModelSpec that a
    file may set. Raise SettingsError if the file cannot be read or is wrong."""
    return checked(read_document(path), path)


def read_document(path: Path) -> dict[Any, Any]:
    """Read the YAML document of a configuration file, whose settings `checked` checks. An empty file gives {}. Raise SettingsError if the
    file cannot be read, is no mapping in YAML, or has a key twice."""
    path = at_home(str(path))
    try:
        document = yaml.load(path.read_text() if _STREAM.fullmatch(str(path)) else regular(path).read_text(), _Loader)
    except OSError as error:
        raise SettingsError(f"configuration {path}: {error.strerror}; name a file that can be read") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: bytes, dates and integers that Python cannot represent
        raise SettingsError(f"configuration {path} is not YAML: {error}") from error
    except RecursionError:
        raise SettingsError(f"configuration {path} is nested too deeply; expected settings, and a list of models") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"configuration {path} is a {type(document).__name__}; expected a mapping from settings to values")
    return cast("dict[Any, Any]", document)


def checked(document: Mapping[Any, Any], path: Path) -> tuple[dict[str, Any], list[ModelSpec]]:
    """Return the settings and the models of a document that was read from the configuration file `path`. Raise SettingsError if a key or a
    value is wrong."""
    names = [s.name for s in SETTINGS]
    values: dict[str, Any] = {}
    specs: list[ModelSpec] = []
    for key, value in document.items():
        where = f"{_key(key)} in {path}"
        if key == "models":
            specs = [model_entry(entry, f"model {number} in {path}") for number, entry in enumerate(_list(value, where), 1)]
        elif key in names:
            values[key] = _from_yaml(key, value, where)
        else:
            raise SettingsError(f"{where} is no setting{_nearest(where.removesuffix(f' in {path}'), [*names, 'models'])}")
    return values, specs


def _list(value: object, where: str) -> list[Any]:
    """Return the value if it is a list. Raise SettingsError if it is not."""
    if not isinstance(value, list):
        raise SettingsError(f"{where} is {_shown(value)}; expected a list")
    return value


def _from_yaml(name: str, value: object, where: str) -> Any:
    """Convert a value of the file. A setting with several values has a list of texts, which becomes a tuple. Any other value that YAML has
    turned into a number or a flag is converted back to text and parsed like values of the environment. Raise SettingsError for a value of
    the wrong type."""
    if TYPES[name].startswith("tuple"):
        if not isinstance(value, list):
            raise SettingsError(f"{where} is a {type(value).__name__}; expected a list")  # leave out the value, which may be an API key
        if not all(isinstance(item, str) for item in value):
            raise SettingsError(
                f"{where} has an entry that YAML does not read as text, such as a number; expected texts: put the entry in quotes"
            )
        return tuple(value)
    if not isinstance(value, str | int | float | bool):
        raise SettingsError(f"{where} is {_shown(value)}; expected a single value")
    try:
        text = str(value)
    except ValueError:
        raise SettingsError(f"{where} is {_shown(value)}; expected {_KINDS['bytes' if name.endswith('_bytes') else 'int'][0]}") from None
    return parse(name, text, where)


def model_entry(entry: object, where: str) -> ModelSpec:
    """Parse an entry of `models` in the file: a text as `model_spec` reads it, or a mapping with a `source` and fields of ModelSpec.
    `where` names the entry in messages. Raise SettingsError if the entry is wrong."""
    if isinstance(entry, str):
        return model_spec(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        raise SettingsError(f"{where} is {_shown(entry)}; expected PATH_OR_ID[=NAME], or fields with a source")
    for key in entry:
        if key not in MODEL_KEYS:
            raise SettingsError(
                f"{_key(key)} of {where} is no field of a model{_nearest(_key(key), MODEL_KEYS)}; known: {', '.join(MODEL_KEYS)}"
            )
    named = model_spec(entry["source"])
    values = {"name": named.name, "embeddings": named.embeddings, **entry, "source": named.source}
    if "name" not in entry and isinstance(given := entry.get("aliases", []), list):
        values["aliases"] = [*given, *(alias for alias in named.aliases if alias not in given)]
    if isinstance(text := values.get("calibrate"), str):
        values["calibrate"] = absolute(text)
    if isinstance(size := values.get("kv_cache_bytes"), str):
        try:
            values["kv_cache_bytes"] = num_bytes_or_share(size)
        except ValueError:
            raise SettingsError(
                f"kv_cache_bytes of {where} is {_shown(size)}; expected a number of bytes, such as 64M or 2G, or a share, such as 50%"
            ) from None
    if not isinstance(given := values.pop("defaults", {}), dict):
        raise SettingsError(f"defaults of {where} is {_shown(given)}; expected a mapping from fields of a request to values")
    try:
        return msgspec.structs.replace(msgspec.convert(values, ModelSpec), defaults=read_values(given, f"defaults of {where}"))
    except DefaultsError as error:
        raise SettingsError(str(error)) from error
    except msgspec.ValidationError as error:
        expectation, _, place = str(error).partition(" - at `$.")
        key = re.split(r"\W", place)[0]
        expected = expectation[:1].lower() + expectation[1:]
        remedy = ": put it in quotes" if re.fullmatch(r"expected `str[^`]*`, got `(int|float|bool)`", expected) else ""
        raise SettingsError(f"{key} of {where} is {_shown(values.get(key))}; {expected}{remedy}") from error


def stages_of(text: str) -> tuple[str, ...]:
    """Parse the value of the option `--stages`: a number of processes, or the places of a model's stages separated by commas. Raise
    SettingsError if the value is wrong."""
    try:
        return parse_places(text)
    except PlaceError as error:
        raise SettingsError(f"--stages: {error}") from error


def model_spec(text: str) -> ModelSpec:
    """Parse `PATH_OR_ID[=NAME]`, or `demo`. Make a path absolute, because the state file outlives the working directory. Without a NAME,
    the source gives the name and the aliases. Raise SettingsError if NAME is a path, or if the source neither exists on this machine nor
    can be the name of a model to download."""
    source, equals, name = text.rpartition("=")
    if not equals or _exists(text):  # the name of a file may contain "="
        source, name = text, ""
    if not source:
        raise SettingsError(f"model {text!r} has no source; expected PATH_OR_ID[=NAME]")
    exists = _exists(source)
    if source == demo.NAME and not exists:
        return ModelSpec(name or demo.NAME, demo.NAME, embeddings=True)  # embeddings are on, so that every endpoint can be tried
    if not exists and name.startswith(("/", "./", "../", "~")) and _exists(name):
        raise SettingsError(f"model {text!r:.400} ends with a path; expected PATH_OR_ID=NAME, here {f'{name}={source}'!r:.400}")
    if not exists:
        source = downloadable(source, "does not exist; expected a folder, a .gguf file, ")
    found = str(settled(at_home(source))) if exists else source
    if not is_unicode(found):
        raise SettingsError(f"model {source!r:.200} {NO_UNICODE}")
    default, aliases = names_of(found)
    return ModelSpec(name, found) if name else ModelSpec(default, found, aliases=aliases)


def absolute(text: str) -> str:
    """Return an absolute path for the path of a file. The empty text, which names no file, stays."""
    return text and str(at_home(text).absolute())


def _exists(source: str) -> bool:
    """Return whether there is a file or folder of this name. Raise SettingsError if the system cannot tell."""
    try:
        return at_home(source).exists()
    except OSError as error:  # a name that is too long, or a folder that this user may not read
        raise SettingsError(f"model {source!r:.200} cannot be read: {error.strerror}") from error


def downloadable(source: str, fault: str = "cannot be downloaded; expected ") -> str:
    """Return a source that is in the catalogue or has the form of a hub id, without the hub's address. Raise SettingsError for any other
    source, without asking the hub. A name that ends in `.gguf` is that of a file, unless it follows a repository and a colon."""
    plain = without_host(source)
    if catalogue.find(plain) is not None or (is_hub_id(plain) and (":" in plain or not plain.endswith(GGUF))):
        return plain
    raise SettingsError(
        f"model {source!r:.200} {fault}a hub id such as ORGANISATION/NAME, or a name that `relaxserve ls --available` lists"
    )
