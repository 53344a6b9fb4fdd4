"""Targets: which target describes a machine, which targets a machine can run, and the errors for targets that it cannot run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import llvmlite.binding as llvm
import pytest

from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from compiler.machine import target
from compiler.machine.target import NAMED, TargetError, get, host, machine, of_gpu, runnable
from runtime import flags
from runtime.device.cpu.host import features
from tests.lesser import is_lesser


def test_host_goes_by_features() -> None:
    with flags.scope(target=None):
        here = host()
        assert features() <= here.features
        assert get("host") is here
        assert here.can_run_here


LEAST = {"x86_64": "x86-64-v3", "aarch64": "aarch64-neon"}


def test_a_switch_takes_this_cpu_for_a_lesser_one() -> None:
    least = NAMED[LEAST[machine().arch]]
    with flags.scope(target=least.name):
        assert host() == replace(least, name="host") and get("host") is host()
        assert [t.name for t in NAMED.values() if t.can_run_here] == [least.name]
        assert compile_module(parse("func main(x: f32[4]) -> object { return x }")).meta.target == least.key


@pytest.mark.parametrize(
    ("name", "said"), [("vax", "RELAXSERVE_TARGET: unknown target 'vax'"), ("alien", "RELAXSERVE_TARGET: .* needs vax")]
)
def test_a_switch_for_another_cpu_is_refused(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(target.NAMED, "alien", replace(machine(), name="alien", arch="vax"))
    with flags.scope(target=name), pytest.raises(TargetError, match=said):
        host()


@pytest.mark.parametrize("name", ["x86-64-v3", "aarch64-neon", "riscv64", "riscv64-v"])
def test_a_machine_generates_code_as_its_named_target_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the features come from the CPU. The rest, such as the code model of RISC-V, comes from the named targets."""
    named = NAMED[name]
    monkeypatch.setattr(target, "ARCH", named.arch)
    monkeypatch.setattr(target, "features", lambda: named.features | {"other"})
    assert machine.__wrapped__() == replace(named, name="host", features=named.features | {"other"})


def test_a_lesser_cpu_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "ARCH", "x86_64")
    monkeypatch.setattr(target, "features", lambda: frozenset({"avx2"}))
    with pytest.raises(TargetError, match=r"lacks bmi, .*fma.*; expected at least x86-64-v3"):
        machine.__wrapped__()


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "ARCH", "s390x")
    with pytest.raises(TargetError, match="s390x"):
        machine.__wrapped__()


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(TargetError, match="unknown target 'avx3'; known: host, x86-64-v3"):
        get("avx3")


def test_a_target_beyond_this_machine_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "host", lambda: replace(NAMED["avx512"], name="host"))
    assert runnable("avx512") is NAMED["avx512"]
    lacks = "amx-bf16, amx-int8, amx-tile, avx512bf16, avx512vbmi, avx512vnni"
    with pytest.raises(TargetError, match=f"'amx' needs {lacks}, which this CPU lacks; it can run host, x86-64-v3, avx512$"):
        runnable("amx")
    with pytest.raises(TargetError, match="needs aarch64, which this CPU lacks"):
        runnable("aarch64-neon")
    monkeypatch.setattr(target, "host", lambda: replace(NAMED["aarch64-dotprod"], name="host"))
    with pytest.raises(TargetError, match="'aarch64-android' needs unknown-linux-android, which this CPU lacks"):
        runnable("aarch64-android")


@pytest.mark.parametrize(
    ("name", "capability", "chosen"),
    [
        ("host", (8, 0), "sm_80"),
        ("host", (8, 6), "sm_80"),
        ("host", (8, 9), "sm_89"),
        ("host", (9, 0), "sm_90a"),
        ("host", (10, 0), "sm_100a"),
        ("host", (12, 0), "sm_89"),
        ("sm_80", (9, 0), "sm_80"),
    ],
)
def test_a_gpu_gets_the_latest_code_that_it_runs(name: str, capability: tuple[int, int], chosen: str) -> None:
    assert of_gpu(name, capability) is NAMED[chosen]


@pytest.mark.parametrize(("name", "capability"), [("host", (7, 5)), ("sm_90a", (8, 9)), ("avx512", (9, 0))])
def test_what_a_gpu_does_not_run_is_refused(name: str, capability: tuple[int, int]) -> None:
    number = ".".join(map(str, capability))
    with pytest.raises(TargetError, match=f"a GPU of compute capability {number} cannot run target '{name}'; it can run "):
        of_gpu(name, capability)


def test_steps_of_one_architecture_grow() -> None:
    steps = [NAMED[n].features for n in ("x86-64-v3", "avx512", "avx512-vnni-bf16", "amx")]
    assert all(a < b for a, b in pairwise(steps))


def test_key_tells_targets_apart_and_is_stable() -> None:
    keys = [t.key for t in NAMED.values()]
    assert len(set(keys)) == len(keys)
    assert NAMED["aarch64-neon"].key == "aarch64:+fp-armv8,+neon"


def test_another_architecture_cannot_run_here() -> None:
    assert [t.can_run_here for t in NAMED.values() if t.arch != host().arch] == [False] * sum(t.arch != host().arch for t in NAMED.values())


@pytest.mark.parametrize("name", list(NAMED))
def test_llvm_knows_every_feature(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    t = NAMED[name]
    machine = llvm.Target.from_triple(t.triple).create_target_machine(cpu=t.cpu, features=t.feature_string)
    machine.emit_assembly(llvm.parse_assembly("define void @f() { ret void }"))
    assert "not a recognized feature" not in capfd.readouterr().err


def test_lanes() -> None:
    assert [NAMED[n].lanes(4) for n in ("x86-64-v3", "amx", "aarch64-neon")] == [8, 16, 4]


@pytest.mark.parametrize(("name", "lesser"), [("x86-64-v3", False), ("avx512", True), ("amx", True)])
def test_a_target_is_lesser_where_the_cpu_has_more(monkeypatch: pytest.MonkeyPatch, name: str, lesser: bool) -> None:
    monkeypatch.setattr("compiler.machine.target.host", lambda: replace(get(name), name="host"))
    assert is_lesser("x86-64-v3") is lesser
