"""SmolLM2 computes the same bits on every machine that runs here: code for the oldest x86 processor, for this one, for browsers, and under
qemu for AArch64 and RISC-V. Each machine continues the same conversations; the logits of all tokens are compared, byte for byte."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.machine.target import NAMED
from deploy.cli.sources import load_of
from deploy.export.c import c_target, export_c
from deploy.export.web import export_web
from deploy.generate import Prompt, encode
from deploy.model_loading.known import begin
from deploy.model_loading.load import loaded
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from server.engine.step_model import StepModel
from tests.deploy.export.conftest import SCRIPTS
from tests.deploy.export.test_c import BUILD_S, MACHINES_IN_QEMU, built
from tests.deploy.export.test_web import batch_of
from tests.node import PATIENCE_S, node
from tests.real.conftest import TARGET, file_of
from tests.real.test_answers import QUESTIONS

MODEL = "smollm2"
CONTEXT = 256
FEW = 2  # conversations of a quick run
NUM_TOKENS = 16
NUM_IN_QEMU = 4  # tokens under qemu, which is slow
SHORT = 12  # tokens of a prompt under qemu
NATIVE = [name for name, target in NAMED.items() if target.can_run_here and name != TARGET] + ["host"]


@cache
def model(target: str = TARGET, kv_dtype: str = "auto") -> Servable:
    return advance(
        begin(load_of(str(file_of(MODEL)), quantize="auto", max_context=CONTEXT, max_batch=1, kv_dtype=kv_dtype, target=target)), Servable
    )


@cache
def step_model(target: str, kv_dtype: str = "auto") -> StepModel:
    found = loaded(model(target, kv_dtype)).step_model
    assert found is not None
    return found


@cache
def prompts() -> list[list[int]]:
    return [encode(model().tokenizer, Prompt(question, False, 1, 0, 0)) for question in QUESTIONS]


@cache
def expected(number: int, num_tokens: int, length: int | None = None, kv_dtype: str = "auto") -> tuple[str, tuple[int, ...]]:
    return continued(TARGET, number, num_tokens, length, kv_dtype)


def continued(target: str, number: int, num_tokens: int, length: int | None = None, kv_dtype: str = "auto") -> tuple[str, tuple[int, ...]]:
    """Decode greedily with native code. Return the digest of the logits, and the tokens."""
    step, tokens, end = step_model(target, kv_dtype), prompts()[number][:length], 0
    rows: list[NDArray[np.float32]] = []
    found: list[int] = []
    for _ in range(num_tokens):
        rows.append(step.download(step.run(batch_of(step, tokens, end)))[0])
        end += len(tokens)
        found.append(int(rows[-1].argmax()))
        tokens = found[-1:]
    return hashlib.sha256(np.stack(rows).tobytes()).hexdigest(), tuple(found)


def numbers(*, quick: bool) -> list[int]:
    return list(range(FEW if quick else len(QUESTIONS)))


SIZES = [pytest.param(True, id="few"), pytest.param(False, id="all", marks=pytest.mark.slow)]


@pytest.mark.covering("target", "kv_dtype", together=1)
@pytest.mark.parametrize("quick", SIZES)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("target", NATIVE)
def test_other_instructions_compute_the_same(target: str, kv_dtype: str, quick: bool) -> None:
    for number in numbers(quick=quick):
        assert continued(target, number, NUM_TOKENS, kv_dtype=kv_dtype) == expected(number, NUM_TOKENS, kv_dtype=kv_dtype)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    export_web(model(), MODEL, folder, levels=["wasm-relaxed"])
    return folder


@pytest.mark.parametrize("quick", SIZES)
def test_a_browser_computes_the_same(site: Path, quick: bool) -> None:
    for number in numbers(quick=quick):
        prompt = str(prompts()[number])
        command = [node(), SCRIPTS / "logits.mjs", site, "wasm-relaxed", prompt, str(NUM_TOKENS), "1"]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr.decode()[-4000:]
        assert hashlib.sha256(done.stdout).hexdigest() == expected(number, NUM_TOKENS)[0], number


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("target", "arch", "flags"), MACHINES_IN_QEMU, ids=[" ".join([m[0], *m[2][1:]]) for m in MACHINES_IN_QEMU])
def test_other_processors_compute_the_same(target: str, arch: str, flags: list[str], kv_dtype: str, tmp_path: Path) -> None:
    emulator = shutil.which(f"qemu-{arch}-static") or shutil.which(f"qemu-{arch}")
    if emulator is None or find_spec("ziglang") is None:
        pytest.skip(f"needs qemu-{arch} and a compiler for it: apt install qemu-user-static, pip install ziglang")
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(Path.home() / ".cache/zig"))
    export_c(model(TARGET, kv_dtype), "smol", c_target(target), tmp_path)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-musl"]
    program = built(tmp_path, SCRIPTS / "logits.c", compiler, "logits", "libsmol.a")
    for number in range(FEW):
        asked = [emulator, *flags, str(program), "1", str(NUM_IN_QEMU), *map(str, prompts()[number][:SHORT])]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, timeout=BUILD_S, check=False)
        if b"decode_save_opc: Assertion" in done.stderr:
            pytest.xfail("qemu 7.2 ends at the instruction vfncvt.rtz.x.f.w, which rounds values to integers of pages")
        assert done.returncode == 0, done.stderr.decode()[-4000:]
        found = hashlib.sha256(done.stdout).hexdigest(), tuple(map(int, done.stderr.split()))
        assert found == expected(number, NUM_IN_QEMU, SHORT, kv_dtype)
