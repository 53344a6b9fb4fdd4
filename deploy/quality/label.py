"""The quality label of a model in one form (a format of its weights, keys and values): how far its predictions are from those of the exact
weights, on the built-in text `label.txt`.

`measure.py` measures the label. The cache stores it under the fingerprint of the form, so that every later load can state it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.cache import Kept, keep
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.fingerprint import fingerprint_of
from deploy.model_loading.known import carried
from runtime.sealed import recall
from server.messages import QualityLabel

VERSION = 1  # part of the cache's keys; increase it when the label of an unchanged model changes
TEXT = Path(__file__).with_name("label.txt")  # prose, questions, code, tables, a letter, a log and four languages


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled(Compiled):
    """The state of a load once its quality label is known, if the load asks for one."""

    label: QualityLabel | None  # None: the load asks for none, or it cannot be measured; `description.py` then looks into the cache


def measure_label(known: Compiled) -> Labelled:
    """Find or measure the quality label, if the load asks for it: after the compilation, so that the measurement uses the program that is
    served, and before the model takes memory."""
    label = None
    if known.measure is not None:
        label = kept_label(known.cache, fingerprint_of(known)) or known.measure(known.load, known.progress)
    return Labelled(**carried(known, Compiled), label=label)


def key_of(subject: str) -> str:
    """Return the name under which the cache stores what was measured for `subject` on the text."""
    parts = subject, VERSION, hashlib.sha256(TEXT.read_bytes()).hexdigest()
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def kept_label(cache: Kept | None, fingerprint: str) -> QualityLabel | None:
    """Return the label that was measured before, or None."""
    if cache is None or (found := recall(cache.label_of(key_of(fingerprint)))) is None:
        return None
    try:
        return msgspec.json.decode(found, type=QualityLabel)
    except msgspec.DecodeError:
        return None


def keep_label(cache: Kept | None, fingerprint: str, label: QualityLabel) -> None:
    if cache is not None:
        keep(cache.label_of(key_of(fingerprint)), msgspec.json.encode(label), "a quality label")
