"""The protocol between a worker and its constraint processes, over one socket pair per process.

A question is a header and token ids. An answer is a header, followed by a text, token ids or a mask.
"""

from __future__ import annotations

import socket
import struct
from array import array
from enum import IntEnum

import msgspec

QUESTION = struct.Struct("<BxxxI")  # Question, number of token ids that follow
# kind of answer, the number that `Answer` explains for this kind, CPU seconds that the question took, number of bytes that follow
ANSWER = struct.Struct("<BxxxIfI")
MAX_TEXT_BYTES = 4096  # most bytes in the payload of an answer that is not a mask


class Question(IntEnum):
    """What the worker asks: the state after the tokens (whether a token may follow, and which ones must), or the mask of the next token."""

    STATE = 1
    MASK = 2


class Answer(IntEnum):
    """The kinds of answers, and what their number and payload mean."""

    BORN = 1  # number: pid of the process
    COMPILED = 2  # number: KiB of memory that the process does not share; payload: why schemas of a lenient source were weakened
    COMPLETE = 3  # no token may follow; number: how many of the last tokens the grammar refuses
    GOES_ON = 4  # a token may follow; number: as for COMPLETE; payload: the forced tokens
    MASK = 5  # payload: the mask
    ERROR = 6  # the client's fault; payload: the message
    TOO_SLOW = 7  # the limit on CPU time is exceeded
    TOO_LARGE = 8  # the limit on memory is exceeded
    ENDED = 9  # written by the parent of the process that owed the answer; number: the signal that ended the process, or 0


class GrammarSettings(msgspec.Struct, frozen=True):
    """The tokens and limits that are the same for all grammars of a model. `ConstraintLimits` explains the limits."""

    eos_ids: list[int]
    vocab_size: int
    grammar_size: int
    row_items: int
    step_items: int
    initial_fuel: int
    compile_s: float
    slow_s: float  # CPU time that each token may take
    excess_s: float  # CPU time beyond slow_s, summed over the tokens of a sequence
    memory_bytes: int  # memory of one process that it does not share with the zygote


class Source(msgspec.Struct, frozen=True):
    """A constraint in the form in which its process receives it: see `server.messages.Constraint`."""

    kind: str
    source: str
    head: str
    is_lenient: bool = False  # a schema in the source that cannot be compiled is weakened; otherwise the whole source is refused


def num_mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask."""
    return -(-vocab_size // 32)


def question(kind: Question, token_ids: list[int]) -> bytes:
    """Return a question as bytes. `token_ids` are the tokens since the last question."""
    return QUESTION.pack(kind, len(token_ids)) + array("i", token_ids).tobytes()


def read_question(sock: socket.socket) -> tuple[int, list[int]] | None:
    """Return the kind and the token ids of the next question, or None if the other end was closed. Raise ConnectionError if it was closed
    within a question."""
    found = sock.recv(4096)  # usually the whole question
    if not found:
        return None
    found += _read(sock, QUESTION.size - len(found))
    kind, num_tokens = QUESTION.unpack_from(found)
    found += _read(sock, QUESTION.size + 4 * num_tokens - len(found))
    return kind, array("i", found[QUESTION.size :]).tolist()


def write_answer(sock: socket.socket, answer: Answer, payload: bytes = b"", *, number: int = 0, took_s: float = 0.0) -> None:
    """Send an answer. A payload that is no mask is cut off after MAX_TEXT_BYTES. Raise ConnectionError if the other end was closed."""
    if answer is not Answer.MASK:
        payload = payload[:MAX_TEXT_BYTES]
    sock.sendall(ANSWER.pack(answer, number, took_s, len(payload)) + payload)


def framed(text: bytes) -> bytes:
    """Return a text with its length before it."""
    return len(text).to_bytes(8, "little") + text


def read_framed(sock: socket.socket) -> bytes:
    """Read a text with its length before it. Raise ConnectionError if the other end was closed before the end of the text."""
    return _read(sock, int.from_bytes(_read(sock, 8), "little"))


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes. Raise ConnectionError if the other end was closed before these bytes were sent."""
    found = bytearray()
    while len(found) < num_bytes:
        more = sock.recv(num_bytes - len(found))
        if not more:
            raise ConnectionResetError
        found += more
    return bytes(found)
