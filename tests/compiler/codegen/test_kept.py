"""The machine code of a kernel is kept, and found again by programs that have the same kernel."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.codegen.kept import KeptCode, key_of, key_of_kernel
from compiler.driver import Options, compile_module, plan
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get, host
from compiler.passes.recall_kernels import RecallKernels
from runtime.executable import Executable
from runtime.session import Session

PROGRAM = """func main(x: f32[n, 4], y: f32[m, 4]) -> object where n in 1..64, m in 1..{most} {{
  a = softmax(x)
  b = exp(y)
  c = (a, b)
  return c
}}"""


ATTENTION = """
func main(q: f32[t, 2, 32], cache: f32[1, 2, pages, 1, 512], tables: i32[s, p], seq: i32[t], at: i32[t]) -> object
    where t in 1..64, s in 1..8, p in 1..{most}, pages in 1.. {{
  a = paged_attention(q, cache, tables, seq, at, 0, scale=0.125)
  return a
}}
"""


def schedules(module: IRModule) -> set[str]:
    return {prim.attrs["schedule"] for prim in module.prim_functions.values()}


def compiled(kernels: KeptCode | None, most: int = 1024) -> Executable:
    return compile_module(parse(PROGRAM.format(most=most)), Options(kept=kernels))


def test_other_limits_compile_only_what_changed(tmp_path: Path) -> None:
    """The range of `m` is part of the code of `exp`, not of `softmax`."""
    compiled(first := KeptCode(tmp_path))
    executable = compiled(second := KeptCode(tmp_path), most=2048)
    assert second.num_reused >= 1 and second.num_reused + second.num_emitted == first.num_emitted
    session, x, y = Session(executable, device_threads=1), np.ones((3, 4), np.float32), np.zeros((1500, 4), np.float32)
    a, b = session.call("main", x, y)
    np.testing.assert_allclose(a, np.full((3, 4), 0.25), rtol=1e-6)
    assert (b == 1).all()


def test_kept_code_is_the_code_of_the_compiler(tmp_path: Path) -> None:
    compiled(KeptCode(tmp_path))
    assert compiled(KeptCode(tmp_path)).object_code == compiled(None).object_code


def test_code_of_a_folder_that_may_only_be_read_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of use cannot be recorded there."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    compiled(KeptCode(tmp_path))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    compiled(second := KeptCode(tmp_path))
    assert second.num_reused > 0 and second.num_emitted == 0


def test_kept_kernels_are_not_scheduled(tmp_path: Path) -> None:
    module = parse(PROGRAM.format(most=1024))
    assert "kept" not in schedules(plan(module, Options(kept=KeptCode(tmp_path))).module)
    compile_module(module, Options(kept=KeptCode(tmp_path)))
    assert schedules(plan(module, Options(kept=KeptCode(tmp_path))).module) == {"kept"}


def test_kept_kernels_keep_their_meaning(tmp_path: Path) -> None:
    module = pipeline(host()).until("lift_weights")(parse(PROGRAM.format(most=1024)))
    compiled(KeptCode(tmp_path))
    recalled = RecallKernels(KeptCode(tmp_path), host())(module)
    verify(recalled)
    assert schedules(recalled) == {"kept"}
    x, y = np.ones((3, 4), np.float32), np.zeros((5, 4), np.float32)
    for ours, meant in zip(Interpreter(recalled).call("main", x, y), Interpreter(module).call("main", x, y), strict=True):
        np.testing.assert_array_equal(ours, meant)


def test_attention_with_workspace_serves_a_longer_context(tmp_path: Path) -> None:
    """The code of attention does not depend on the length of the page table. Its workspace does."""
    compile_module(parse(ATTENTION.format(most=256)), Options(kept=KeptCode(tmp_path)))
    module = parse(ATTENTION.format(most=512))
    planned = plan(module, Options(kept=KeptCode(tmp_path))).module
    attention = planned.prim("paged_attention")
    assert attention.attrs["schedule"] == "kept" and attention.attrs["num_workspaces"] > 0
    ours, plain = compile_module(module, Options(kept=KeptCode(tmp_path))), compile_module(module)
    assert (ours.meta, ours.object_code) == (plain.meta, plain.object_code)


def test_texts_are_complete_although_code_is_kept(tmp_path: Path) -> None:
    module = parse(PROGRAM.format(most=1024))
    compiled(KeptCode(tmp_path))
    texts = compile_module(module, Options(kept=KeptCode(tmp_path), texts=True)).texts
    assert texts == compile_module(module, Options(texts=True)).texts


@pytest.mark.parametrize(("name", "modules"), [("wasm-simd128", 1), ("sm_80", 2)])
def test_only_modules_count_where_kernels_are_linked_into_one(tmp_path: Path, name: str, modules: int) -> None:
    """A GPU also has a module for the host."""
    counts: list[tuple[int, int]] = []
    for _ in range(2):
        compile_module(parse(PROGRAM.format(most=1024)), Options(get(name), kept=(kept := KeptCode(tmp_path))))
        counts.append((kept.num_reused, kept.num_emitted))
    assert counts == [(0, modules), (modules, 0)]


@pytest.mark.parametrize("at", [0, -1])
def test_a_changed_entry_is_compiled_again(tmp_path: Path, at: int) -> None:
    compiled(first := KeptCode(tmp_path))
    for path in first.paths():
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
    executable = compiled(second := KeptCode(tmp_path))
    assert second.num_reused == 0 and executable.object_code == compiled(None).object_code


def test_a_folder_that_takes_nothing_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    executable = compiled(kernels := KeptCode(tmp_path / "file"))
    assert kernels.num_emitted > 1 and executable.object_code == compiled(None).object_code
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(tmp_path) in caplog.text


def test_entries_that_were_used_least_recently_go_first(tmp_path: Path) -> None:
    compiled(kernels := KeptCode(tmp_path))
    assert all(path.stat().st_mode & 0o077 == 0 for path in kernels.paths())
    KeptCode(tmp_path, most_bytes=0).trim()
    assert not kernels.paths()


def test_the_key_holds_the_text_and_the_target() -> None:
    here = host()
    others = [key_of("b", here), key_of("a", replace(here, cpu="x")), key_of("a", replace(here, code_model="large"))]
    assert key_of("a", here) not in others


def test_the_key_of_a_kernel_holds_its_nest_its_ranges_and_the_target() -> None:
    def prim(most: int, factor: float, name: str = "x") -> PrimFunc:
        store = f"b[i] = {name}[i] * {factor}"
        return parse(f"prim k({name}: f32[n], out b: f32[n]) where n in 0..{most} {{ for i in n {{ {store} }} }}").prim("k")

    here = host()
    key = key_of_kernel(prim(64, 2.0), here)
    assert key == key_of_kernel(prim(64, 2.0, "other"), here)
    others = [key_of_kernel(prim(65, 2.0), here), key_of_kernel(prim(64, 3.0), here), key_of_kernel(prim(64, 2.0), replace(here, cpu="x"))]
    assert key not in others
