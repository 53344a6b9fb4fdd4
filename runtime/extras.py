"""Say how to install an extra of the package, such as `media`."""

from __future__ import annotations


def installing(extra: str) -> str:
    """Return the remedy if an extra is missing. It names a checkout, never the project `relaxserve` of a package index: no index has it,
    and if relaxserve was installed with pipx or uv, the shell's pip would ask one for it, where anybody could take the name."""
    return f"in a checkout, install '.[{extra}]' as relaxserve was installed (pipx and uv: with --force, and with all extras that you use)"
