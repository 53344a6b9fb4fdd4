"""Read a file with a secret that several servers share: servers that compute stages of one model, or servers that exchange cache pages."""

from __future__ import annotations

from pathlib import Path

from server.settings import SettingsError

LEAST_SECRET = 16  # characters


def read_secret(file: Path, name: str) -> str:
    """Return the secret in a file, without white space around it. `name` is the setting that gives the file. Raise SettingsError if the
    secret is too short or the file cannot be read."""
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(
            f"{name} {file} cannot be read: {why}; name a file with a secret of at least {LEAST_SECRET} characters"
        ) from error
    if len(secret) < LEAST_SECRET:
        raise SettingsError(f"the secret in {file} ({name}) has {len(secret)} characters; expected at least {LEAST_SECRET}")
    return secret
