"""Take keys, tokens and passwords out of the environment, so that processes started later cannot read them."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, MutableMapping

# Any variable whose last word names a secret: RELAXSERVE_ADMIN_KEYS, HF_TOKEN, AWS_SECRET_ACCESS_KEY.
SECRET = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|CREDENTIALS?)$", re.IGNORECASE)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def take_secrets(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Remove secrets from `environment` and from /proc/PID/environ, which shows a process's initial environment, and return them. Call this
    before threads and child processes start."""
    names = [name for name in environment if SECRET.search(name)]
    for name in names:
        _blank(name)
    return {name: environment.pop(name) for name in names}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environment` without secrets, for a process that starts before `take_secrets` removes them."""
    return {name: value for name, value in environment.items() if not SECRET.search(name)}


def hub_token(secrets: Mapping[str, str]) -> str | None:
    """Return the token for the hub among secrets that were taken, or None if there is none or it is empty."""
    return next((secrets[name] for name in HUB_TOKENS if secrets.get(name)), None)


def _blank(name: str) -> None:
    """Overwrite the value of a variable with zeros, in the memory that /proc/PID/environ shows."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if (value := getenv(os.fsencode(name))) is not None:
        ctypes.memset(value, 0, len(ctypes.string_at(value)))
