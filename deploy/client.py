"""A client of a running server, on the standard library: the administration, and one streamed conversation.

ServerFault    the server cannot be reached, or its answer is an error
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlsplit

from deploy.settings import KEY_VARIABLE
from server.settings import is_loopback


class ServerFault(Exception):
    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Client:
    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ServerFault(f"the server's address is {url!r}; expected http://HOST:PORT")
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        # A proxy of the environment cannot reach this machine's own loopback.
        proxies = urllib.request.ProxyHandler({} if is_loopback(parts.hostname or "") else None)
        self._opener = urllib.request.build_opener(proxies)
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        return self._json("GET", path)

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        return self._json("POST", path, body)

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def events(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Iterator[Any]:
        """The JSON of a stream of events, one by one. An event with an error raises it."""
        with closing(self._open(method, path, body)) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue  # a heartbeat, or the end of an event
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if isinstance(event.get("error"), dict) and "object" not in event:
                    raise _fault(event)
                yield event

    def chat(self, model: str, messages: Sequence[Mapping[str, str]], **options: object) -> Iterator[str]:
        """The answer's text as it comes."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        for event in self.events("POST", "/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    yield text

    def models(self) -> list[str]:
        return [model["id"] for model in self.get("/v1/models")["data"]]

    def _json(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        with closing(self._open(method, path, body)) as response:
            return json.load(response)

    def _open(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:
        headers = {**self._headers, "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _fault(_parsed(error.read()), error.code) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise ServerFault(
                f"no server answers at {self.url}: {reason}; start one with `relaxserve serve`, or name it by --url"
            ) from None


def segment(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        return json.loads(body)
    except ValueError:
        return {}


def _fault(answer: Mapping[str, Any], status: int | None = None) -> ServerFault:
    error = answer.get("error", {})
    message = error.get("message") or f"the server answered with status {status}"
    if error.get("code") in ("invalid_api_key", "admin_key_required"):
        message += f"; give one by {KEY_VARIABLE} or --key"
    details = ", ".join(f"{name} {value}" for name, value in error.items() if name not in ("message", "type", "param", "code"))
    return ServerFault(f"{message} ({details})" if details else message, error.get("code") or "")
