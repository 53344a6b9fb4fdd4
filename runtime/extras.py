"""Say how to install an extra of the package, such as `media`."""

from __future__ import annotations


def installing(extra: str) -> str:
    """Return what a user must do if an extra is missing. The text says to install from a checkout. It never names a project `relaxserve`
    for pip to find: no package index has this project, so anybody could register the name, and pip would install their code."""
    return f"in a checkout, install '.[{extra}]' as relaxserve was installed (pipx and uv: with --force, and with all extras that you use)"
