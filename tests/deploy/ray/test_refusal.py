"""A refusal is ready at once: whatever it needs is imported before the first request."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

REFUSING = """
import sys
from deploy.ray.refusal import refusal
from server.errors import NO_REPLICA, ApiError
before = {*sys.modules}
answer = refusal("/v1/messages", ApiError(NO_REPLICA, "none"))
assert b'"type":"error"' in answer.body, answer.body
print(*sorted(name for name in {*sys.modules} - before if name.startswith(("server.", "fastapi", "pydantic"))))
"""


def test_the_first_refusal_imports_no_api() -> None:
    found = subprocess.run([sys.executable, "-c", REFUSING], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
