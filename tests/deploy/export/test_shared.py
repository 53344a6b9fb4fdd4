"""A shared library is loaded into a running process. tests/deploy/export/test_c.py links programs with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.export.c import c_target, export_c
from deploy.model_loading.servable import Servable
from tests.deploy.export.conftest import SCRIPTS
from tests.deploy.export.test_web import NUM_TOKENS, golden, native
from tests.node import PATIENCE_S

pytestmark = [
    pytest.mark.xdist_group("web"),
    pytest.mark.skipif(not c_target("x86-64-v3").can_run_here, reason="needs x86-64-v3: the library contains instructions of that level"),
]


def decoded(prompt: list[int], *libraries: Path) -> tuple[bytes, list[list[int]]]:
    """Decode in a process of its own. Return the logits of all libraries, and the tokens of each."""
    command = [sys.executable, SCRIPTS / "in_ctypes.py", str(NUM_TOKENS), json.dumps(prompt), *libraries]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return done.stdout, [[int(token) for token in line.split()] for line in done.stderr.decode().splitlines()]


def test_a_loaded_library_gives_the_bytes_of_the_native_program(library: Path, demo: Servable) -> None:
    prompt, expected, tokens = native(demo)
    logits, found = decoded(prompt, library / "libdemo.so")
    assert found == [tokens] and logits == expected.tobytes()


def test_two_models_with_the_same_names_share_a_process(library: Path, demo: Servable, tmp_path: Path) -> None:
    """Both libraries have the functions rs_open, rs_new and so on, and offer them to the whole process. Each library calls its own."""
    other = export_c(golden("llama", demo), "other", c_target("x86-64-v3"), tmp_path, shared=True)
    prompt = [5, 6, 7, 8]
    paths = [library / "libdemo.so", other]
    alone = [decoded(prompt, path) for path in paths]
    assert alone[0] != alone[1]
    logits, tokens = decoded(prompt, *paths)
    assert logits == alone[0][0] + alone[1][0] and tokens == [alone[0][1][0], alone[1][1][0]]
