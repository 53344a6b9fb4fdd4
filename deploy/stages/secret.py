"""Read the secret that a server shares with the hosts of stages."""

from __future__ import annotations

from pathlib import Path

from server.settings import SettingsError

LEAST_SECRET = 16  # characters


def read_secret(file: Path, name: str) -> str:
    """Read the secret that workers and hosts of stages share. `name`: of the setting that names the file."""
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
