"""The quality label of a model in one form: how far its predictions are from those of the exact weights, on the built-in text `label.txt`.

`measure.py` measures it. The label is stored in the cache under the fingerprint of the form, so that every later load can state it.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from deploy.cache import NOT_CACHED, Kept
from runtime.errors import RuntimeFault
from runtime.sealed import load, store
from server.messages import QualityLabel

log = logging.getLogger(__name__)

VERSION = 1  # raised when equal models get other labels
TEXT = Path(__file__).with_name("label.txt")  # prose, questions, code, tables, a letter, a log and four languages


def key_of(subject: str) -> str:
    """Return the name under which what was measured on the text is stored."""
    parts = subject, VERSION, hashlib.sha256(TEXT.read_bytes()).hexdigest()
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def kept_label(cache: Kept | None, fingerprint: str) -> QualityLabel | None:
    """Return the label that was measured before, or None."""
    if cache is None:
        return None
    try:
        return msgspec.json.decode(bytes(load(cache.label_of(key_of(fingerprint)))), type=QualityLabel)
    except (OSError, RuntimeFault, msgspec.DecodeError):
        return None


def keep_label(cache: Kept | None, fingerprint: str, label: QualityLabel) -> None:
    if cache is None:
        return
    place = cache.label_of(key_of(fingerprint))
    try:
        store(place, msgspec.json.encode(label))
    except OSError as error:
        log.warning(NOT_CACHED, "a quality label", place.parent, error.strerror or error)
