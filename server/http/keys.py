"""Read the keys of a server with their groups and limits, and find the key of a request. FORM shows the syntax of a line with a key, its
group and its limits."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from runtime.files import regular
from server.settings import SettingsError

log = logging.getLogger(__name__)

MIN_KEY_CHARS = 8
MOST_PER_MINUTE = 10**9
GROUP = "group/"  # begins the tenant of a group
GROUP_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
PATTERN = re.compile(r"[A-Za-z0-9._:/*?\[\]!-]{1,128}")  # a pattern for names of models, as shells have for file names
WORD = re.compile(r"[a-z_]+=\S*")
RATES = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
FORM = f"KEY group=NAME model=PATTERN {' '.join(f'{rate}=N' for rate in RATES)}, each part but KEY optional, and model repeatable"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The models and rates to which a key is limited. None: no limit."""

    models: tuple[str, ...] = ()  # patterns of the names that the key may use; empty: all
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def allow(self, name: str) -> bool:
        """Return whether requests with the key may use this name of a model."""
        return not self.models or any(fnmatchcase(name, pattern) for pattern in self.models)

    @property
    def has_rates(self) -> bool:
        """Whether any rate is limited."""
        return any(getattr(self, rate) is not None for rate in RATES)


UNLIMITED = KeyLimits()
NO_MODELS = KeyLimits(models=("",))  # no model has an empty name


@dataclass(frozen=True, slots=True)
class Known:
    """A key of the ring, and the tenant whose cached state its requests may reuse: the key alone, or its group."""

    digest: bytes
    tenant: str
    limits: KeyLimits = UNLIMITED


class KeyRing:
    """A set of keys, given in the settings, in a file, or in both. The file is read again when it changes. `setting` is the name of the
    setting, for errors. `takes_limits` is false for keys that may do everything. Raise SettingsError if a key is malformed, or the file
    cannot be used."""

    def __init__(self, keys: Sequence[str], file: Path | None, setting: str, *, takes_limits: bool = True) -> None:
        self._takes_limits = takes_limits
        self._given = [self._known(key, setting) for key in keys]
        self._file = file
        self._stamp: tuple[int, int] | None = None  # time of the last change and size of the file when its keys were read
        self._refused: tuple[int, int] | None = None  # the same of a file that is malformed; None: the file is not malformed
        self._read: list[Known] = []
        self._fault = ""  # the last fault that was logged
        self.exists = bool(keys) or file is not None
        self._refresh()

    def find(self, key: str) -> Known | None:
        """Return what is known of `key`, or None if the key is not in the set. Every key is compared in constant time, so the time reveals
        neither which key matches nor how much of a key matches."""
        self._refresh()
        digest, found = digest_of(key), None
        for known in (*self._given, *self._read):
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found

    def limits_of(self, short_digest: str) -> KeyLimits | None:
        """Return the limits of the key with this short digest (see `short`), or None if the set has no such key."""
        self._refresh()
        return next((known.limits for known in (*self._given, *self._read) if short(known.digest) == short_digest), None)

    @property
    def short_digests(self) -> set[str]:
        """The short digests of all keys (see `short`)."""
        return {short(known.digest) for known in (*self._given, *self._read)}

    @property
    def restricts_models(self) -> bool:
        """True if some keys may not use all models."""
        return any(known.limits.models for known in (*self._given, *self._read))

    def _known(self, line: str, where: str) -> Known:
        """Return the key in a line. Raise SettingsError if the line is malformed, or has limits although the ring takes none."""
        known = read_line(line, where)
        if known.limits != UNLIMITED and not self._takes_limits:
            raise SettingsError(f"{where} has a key with limits; an admin key may use everything: make it an API key, or remove the limits")
        return known

    def _refresh(self) -> None:
        """Read the file again if it changed. The first time, raise SettingsError if the file cannot be read, is malformed or has no key.
        Later, a file that cannot be read or is malformed leaves the keys as they are, which is better than shutting everyone out or letting
        everyone in. A file without keys removes all keys that were read from it."""
        if self._file is None:
            return
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._refused:  # reading the file again takes long if it has many keys
                return
            if stamp == self._stamp:
                self._refused, self._fault = None, ""
                return
            self._refused = stamp  # reset below, once all lines are read
            lines = [line.strip() for line in regular(self._file).read_text().splitlines()]
            keys = [line for line in lines if line and not line.startswith("#")]
            if not keys and self._stamp is None:
                raise SettingsError("the file has no key; expected one per line")
            self._read = [self._known(key, "a line") for key in keys]
            self._stamp, self._refused, self._fault = stamp, None, ""
        except (OSError, UnicodeDecodeError, SettingsError) as error:
            if self._stamp is None:
                reason = f"{error.strerror}; name a file that can be read" if isinstance(error, OSError) else str(error)
                raise SettingsError(f"key file {self._file}: {reason}") from error
            if isinstance(error, OSError):  # the file may be readable the next time, with the same stamp
                self._refused = None
            if self._fault != str(error):
                log.error("key file %s: %s; the keys read before stay valid", self._file, error)
                self._fault = str(error)


def read_line(line: str, where: str) -> Known:
    """Return what a line says of a key: its digest, tenant and limits. `where` names the line in errors, which never show the key. Raise
    SettingsError if the line does not have the form FORM, or if the key, its group or a limit is not valid."""
    key, words = line, list[str]()
    while (parts := key.rsplit(maxsplit=1))[1:] and WORD.fullmatch(parts[1]):
        key, words = parts[0].rstrip(), [parts[1], *words]
    if re.search(rf"\s({'|'.join(('group', 'model', *RATES))})=", key):
        raise SettingsError(f"{where} has a key that another word follows; expected {FORM}")
    if re.search(r"\s#", key):
        raise SettingsError(f"{where} has a key that a comment follows; remove the comment")
    values: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        values.setdefault(name, []).append(value)
    digest = digest_of(_checked(key, where))
    group = _group(values, where)
    # a digest has no slash, so it never equals the tenant of a group
    return Known(digest, GROUP + group if group else short(digest), _limits(values, where))


def _group(values: Mapping[str, list[str]], where: str) -> str:
    """Return the group of a key, or an empty text if it has none. Raise SettingsError if a line names several groups, or if the name of the
    group is not valid."""
    given = values.get("group")
    if given is None:
        return ""
    if len(given) > 1 or not GROUP_NAME.fullmatch(given[0]):
        text = ", ".join(given)
        raise SettingsError(f"{where} has the group {text!r:.80}; expected KEY group=NAME, with a name of letters, digits and ._-")
    return given[0]


def _limits(values: Mapping[str, list[str]], where: str) -> KeyLimits:
    """Return the limits of a key. Raise SettingsError if a limit is unknown, given twice or out of range, or if a `model` is no pattern of
    names."""
    found: dict[str, int] = {}
    for name, given in values.items():
        if name in ("group", "model"):
            continue
        if name not in RATES:
            raise SettingsError(f"{where} has {name}= behind a key, which is no limit; expected {FORM}")
        if len(given) > 1 or not re.fullmatch(r"\d{1,10}", given[0]) or not 1 <= int(given[0]) <= MOST_PER_MINUTE:
            raise SettingsError(f"{where} has {name}={', '.join(given):.80}; expected one number from 1 to {MOST_PER_MINUTE}")
        found[name] = int(given[0])
    models = tuple(values.get("model", ()))
    for pattern in models:
        if not PATTERN.fullmatch(pattern):
            raise SettingsError(
                f"{where} has model={pattern:.80}; expected a name of a model, in which * stands for any text; repeat model="
            )
    return KeyLimits(models, **found)


def _checked(key: str, where: str) -> str:
    """Return a key. Raise SettingsError if the key is too short, or does not fit into a header."""
    if len(key) < MIN_KEY_CHARS:
        raise SettingsError(f"{where} has a key of {len(key)} characters; expected at least {MIN_KEY_CHARS}")
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{where} has a key that does not fit into an HTTP header; expected printable ASCII")
    return key


def digest_of(key: str) -> bytes:
    """Return the digest of a key."""
    return hashlib.sha256(key.encode()).digest()


def short(digest: bytes) -> str:
    """Return the beginning of a digest, which names a key in logs and quotas."""
    return digest.hex()[:16]
