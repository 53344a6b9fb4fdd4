"""An HTTP client for a running server: administration and streamed chat. It uses the HTTP client of the standard library.

ServerFault    the server is unreachable, is not relaxserve, or answers with an error
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from typing import Any
from urllib.parse import quote, urlsplit

from deploy.settings import KEY_VARIABLE
from runtime.units import in_units
from server.settings import is_loopback


class ServerFault(Exception):
    """Raised if the server is unreachable, is not relaxserve, or answers with an error. `code` is the error's code, or ""."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Client:
    """Sends requests to one server, with its API key. The methods raise ServerFault if the server cannot be reached or is not relaxserve,
    and all but `send` also if it answers with an error."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float | None = 600.0) -> None:
        """`timeout_s` is the longest wait for the server's next bytes; None: without limit. Raise ServerFault if the address or the key
        cannot be used. Nothing is sent yet."""
        host = _host(url)
        if key and not (key.isascii() and key.isprintable()):
            raise ServerFault(f"the API key cannot be sent in an HTTP header; expected printable ASCII in {KEY_VARIABLE} or --key")
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        # For a loopback address, ignore proxies from the environment: they cannot reach this machine's loopback interface.
        proxies = urllib.request.ProxyHandler({} if is_loopback(host) else None)
        self._opener = urllib.request.build_opener(proxies)
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        return self._json("GET", path)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        return self._json("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def send(self, path: str, body: bytes) -> bytes:
        """Post a body, and return the body of the answer as it is, whatever its status. If the answer is a stream, return all its events
        once it has ended."""
        with self._told():
            try:
                with closing(self._open("POST", path, body)) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.read()

    def events(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Iterator[Any]:
        """Yield the JSON of each event of a stream, until `data: [DONE]`. Raise ServerFault if an event or the answer's status reports an
        error, or if the answer ends without `data: [DONE]`."""
        with self._told(), closing(self._open(method, path, body)) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue  # a heartbeat comment, or the blank line after an event
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event.get("error"), dict) and "object" not in event:
                    raise _fault(event)
                yield event
            raise IncompleteRead(b"")  # `http.client` treats a connection that breaks off between two chunks as the end of the answer

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        told: Callable[[Mapping[str, int]], None] = lambda _usage: None,
        called: Callable[[list[dict[str, Any]]], None] = lambda _calls: None,
        **options: object,
    ) -> Iterator[str]:
        """Yield the answer's text as it arrives. Call `told` with the token usage so far whenever an event has it: with relaxserve, before
        each piece of text and at the end. If the answer ends with calls of tools, call `called` with them. `options` are further fields of
        the request."""
        calls: dict[int, dict[str, Any]] = {}
        usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        body = {"model": model, "messages": list(messages), "stream": True, **usage, **options}
        for event in self.events("POST", "/v1/chat/completions", body):
            if event.get("usage"):
                told(event["usage"])
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    yield text
                for part in choice["delta"].get("tool_calls") or ():
                    _add_call(part, calls)
                if choice.get("finish_reason") == "tool_calls":
                    called(list(calls.values()))

    def chat_models(self) -> list[str]:
        """Return the names of the models that answer conversations. If a server does not state whether a model does, return the model
        unless the server states that it generates no text."""
        return [model["id"] for model in self.get("/v1/models")["data"] if model.get("chats", model.get("generates", True))]

    def _json(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Send a request and return the JSON object of the answer. Raise ServerFault if the answer reports an error or is no JSON
        object."""
        with self._told(), closing(self._open(method, path, body)) as response:
            answer = json.load(response)
            if not isinstance(answer, dict):
                raise ValueError(f"the answer to {path} is not a JSON object")
            return answer

    def _open(self, method: str, path: str, body: Mapping[str, object] | bytes | None) -> Any:
        headers = {**self._headers, "content-type": "application/json"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return self._opener.open(request, timeout=self._timeout_s)

    @contextmanager
    def _told(self) -> Generator[None]:
        """Turn an error of the server or of the connection inside the `with` into a ServerFault that says what to do."""
        try:
            yield
        except urllib.error.HTTPError as error:
            with error:
                raise _fault(
                    _parsed(error.read()), f"{self.url} answered with status {error.code}, but not with an error of relaxserve"
                ) from None
        except (IncompleteRead, RemoteDisconnected):
            raise ServerFault(f"the server at {self.url} broke off its answer; see its log, or give the right address by --url") from None
        except (HTTPException, ValueError) as error:
            said = str(error).strip() or type(error).__name__
            raise ServerFault(f"the server at {self.url} is not relaxserve ({said:.80}); give the right address by --url") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise ServerFault(
                f"no server answers at {self.url}: {reason}; start one with `relaxserve serve`, or give its address by --url"
            ) from None


def _add_call(part: Mapping[str, Any], calls: dict[int, dict[str, Any]]) -> None:
    """Add a piece of a tool call from an event to `calls`, which has the calls so far by their index."""
    function = part.get("function", {})
    call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""


def segment(name: str) -> str:
    """Percent-encode a name, so that it is a single segment of a URL path."""
    return quote(name, safe="")


def _host(url: str) -> str:
    """Return the host of a server's address. Raise ServerFault if the address is not an HTTP address with a host."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.hostname
    except ValueError:  # the port is not a number
        pass
    raise ServerFault(f"the server's address is {url!r}; expected http://HOST:PORT")


def _parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON of an error envelope, or {} for any other body."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(answer, dict):
        return {}
    if isinstance(answer.get("error"), str) and "code" in answer:  # an error of our paths below /api, in the shape of Ollama's errors
        return {"error": {"message": answer["error"], "code": answer["code"]}}
    return answer if isinstance(answer.get("error"), dict) else {}


def _fault(answer: Mapping[str, Any], otherwise: str = "the server failed") -> ServerFault:
    """Return the fault that an error envelope reports: its message, for errors of keys a remedy, and its further fields. If the envelope
    has no message, the fault's message is `otherwise`."""
    error = answer.get("error", {})
    message = error.get("message") or otherwise
    if error.get("code") in ("invalid_api_key", "admin_key_required"):
        message += f"; give a key by {KEY_VARIABLE} or --key"
    details = ", ".join(_detail(name, value) for name, value in error.items() if name not in ("message", "type", "param", "code") and value)
    return ServerFault(f"{message} ({details})" if details else message, error.get("code") or "")


def _detail(name: str, value: Any) -> str:
    """Return a further field of an error in words. A number of bytes gets a unit."""
    if name == "evictable":
        return ", ".join(f"unloading {model['model']} frees {in_units(model['bytes'])}" for model in value)
    return f"{name.removesuffix('_bytes')} {in_units(value)}" if name.endswith("_bytes") else f"{name} {value}"
