"""Write the parts that chat and completion answers share: the envelope (the fields around `choices`), and the usage in streams."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from server.api.answer.generate import Usage
from server.api.answer.shapes import Envelope
from server.api.context import answer_id
from server.api.request.schema import ChatBody, CompletionBody
from server.models.model import Loaded, Model
from server.open_values import created_s

encode = msgspec.json.encode


def envelope(kind: str, id_prefix: str, body: ChatBody | CompletionBody, model: Model, loaded: Loaded) -> Envelope:
    """Return the fields around the choices of an answer. `kind` is the value of `object`, and `id` begins with `id_prefix`."""
    return {
        "id": answer_id(id_prefix, body.request_id),
        "object": kind,
        "created": int(created_s()),
        "model": body.model or model.spec.name,
        "system_fingerprint": loaded.fingerprint,
    }


class ChunkFrame:
    """The bytes around the choices of each chunk. `stream_options` decides which chunks report usage."""

    def __init__(self, envelope: Envelope, body: ChatBody | CompletionBody, usage: Callable[[], Usage]) -> None:
        """`usage` returns the present counts of tokens."""
        options = body.stream_options
        self._usage = usage
        self._in_each_chunk = options is not None and bool(options.continuous_usage_stats)
        self._in_a_last_chunk = self._in_each_chunk or (options is not None and bool(options.include_usage))
        self._constant_tail = b'],"usage":null}' if self._in_a_last_chunk else b"]}"
        self.head = encode(envelope)[:-1] + b',"choices":['  # bytes before the choices of a chunk

    @property
    def tail(self) -> bytes:
        """The bytes after the choices of the next chunk."""
        return self._usage_tail() if self._in_each_chunk else self._constant_tail

    @property
    def last_chunks(self) -> list[bytes]:
        """A list with the final chunk, which has the usage and no choices. The list is empty unless the client requested usage."""
        return [self.head + self._usage_tail()] if self._in_a_last_chunk else []

    def _usage_tail(self) -> bytes:
        """Return the bytes after the choices of a chunk, with the present usage."""
        return b'],"usage":' + encode(self._usage().describe()) + b"}"
