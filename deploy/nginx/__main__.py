"""Write the paths of the administration into nginx.conf: `python -m deploy.nginx`. The paths are those of server/http/auth.py."""

from __future__ import annotations

import re
from pathlib import Path

from server.http.auth import ADMIN_PATTERNS

FILE = Path(__file__).with_name("nginx.conf")
_WRITTEN = re.compile(r"(?<=written by python -m deploy\.nginx:\n)    location ~ .* \{")


def with_admin_paths(text: str) -> str:
    """Return the text of nginx.conf with the present paths of the administration. `(?s)` lets `.` match line feeds, as the server does;
    nginx compares paths after it has decoded them and merged their slashes."""
    line = f'    location ~ "(?s)^({"|".join(ADMIN_PATTERNS)})$" {{'
    written, count = _WRITTEN.subn(lambda _: line, text)
    assert count == 1, f"{FILE} has {count} places for the paths of the administration"
    return written


if __name__ == "__main__":
    FILE.write_text(with_admin_paths(FILE.read_text()))
