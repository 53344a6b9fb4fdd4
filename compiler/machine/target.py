"""Machines that code is generated for.

A target is what its instructions can do, never what it is called: LLVM misnames CPUs inside virtual machines, but its list of
features is right. The named targets are steps of capability; the host is whatever the CPU reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from runtime import flags
from runtime.device.cpu.host import ARCH, features
from runtime.device.cuda.capability import Capability, runs

LINE_BYTES: Final = 64  # of a cache
LINUX: Final = "unknown-linux-gnu"
GPU: Final = "nvidia-cuda"


class TargetError(Exception):
    """A target that is not known, or a machine that nothing can be generated for."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    arch: str  # as LLVM names it: x86_64, aarch64, riscv64, wasm32
    features: frozenset[str]  # in LLVM's spelling
    vector_bits: int  # of the widest registers that arithmetic works on
    system: str = LINUX  # vendor, system and ABI: what follows the architecture in LLVM's triple
    fused: bool = True  # whether an instruction multiplies and adds with one rounding
    halves: bool = True  # whether instructions convert f16
    relocation: str = "pic"  # the model of relocation, as LLVM names it
    code_model: str = "default"
    abi: str = ""  # how calls pass floats, where the triple leaves a choice
    cpu: str = ""  # LLVM's name of the processor, where features do not say it all

    @property
    def triple(self) -> str:
        return f"{self.arch}-{self.system}"

    @property
    def feature_string(self) -> str:
        return ",".join(f"+{f}" for f in sorted(self.features))

    @property
    def key(self) -> str:
        """A text that is equal for targets with equal code, on every machine."""
        system = "" if self.system == LINUX else f"@{self.system}"
        return f"{self.arch}:{self.feature_string}{system}"

    @property
    def can_run_here(self) -> bool:
        return self.within(host())

    def within(self, other: Target) -> bool:
        """Whether the other machine runs code for this one."""
        return self.arch == other.arch and self.system == other.system and self.features <= other.features

    def lanes(self, num_bytes: int) -> int:
        """Elements of this size in a register."""
        return self.vector_bits // (8 * num_bytes)


# What those of a row imply (avx and sse of avx2, for example) LLVM adds itself.
_X86_V3: Final = frozenset(["avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"])
_AVX512: Final = _X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16: Final = _AVX512 | {"avx512vnni", "avx512bf16"}
_AVX512_BF16_AMD: Final = _AVX512_BF16 | {"sse4a"}
_AMX: Final = _AVX512_BF16 | {"amx-tile", "amx-bf16", "amx-int8"}
_NEON: Final = frozenset(["fp-armv8", "neon"])
_NEON_DOT: Final = _NEON | {"fullfp16", "dotprod"}
_NEON_BF16: Final = _NEON_DOT | {"i8mm", "bf16"}
_RISCV: Final = frozenset(["m", "a", "f", "d", "c"])
_WASM: Final = frozenset(["simd128", "bulk-memory", "mutable-globals", "nontrapping-fptoint", "sign-ext"])


def _wasm(name: str, features: frozenset[str], *, fused: bool) -> Target:
    return Target(name, "wasm32", features, 128, system="unknown-unknown", fused=fused, halves=False, relocation="static")


def _gpu(name: str, ptx: str) -> Target:
    """Registers are as wide as the widest access of a thread. PTX of a name that ends in "a" runs on that very generation alone, other PTX
    on those that follow, too."""
    return Target(name, "nvptx64", frozenset([name, ptx]), 128, system=GPU, cpu=name)


# A row is a target. The first one of an architecture is the least that code is generated for.
NAMED: Final = {
    t.name: t
    for t in (
        Target("x86-64-v3", "x86_64", _X86_V3, 256),
        Target("avx512", "x86_64", _AVX512, 512),
        Target("avx512-vnni-bf16", "x86_64", _AVX512_BF16, 512),
        Target("avx512-bf16-amd", "x86_64", _AVX512_BF16_AMD, 512),
        Target("amx", "x86_64", _AMX, 512),
        Target("aarch64-neon", "aarch64", _NEON, 128),
        Target("aarch64-dotprod", "aarch64", _NEON_DOT, 128),
        Target("aarch64-i8mm-bf16", "aarch64", _NEON_BF16, 128),
        Target("aarch64-android", "aarch64", _NEON_DOT, 128, system="linux-android"),
        Target("riscv64", "riscv64", _RISCV, 128, halves=False, code_model="medium", abi="lp64d"),
        Target("riscv64-v", "riscv64", _RISCV | {"v"}, 128, halves=False, code_model="medium", abi="lp64d"),
        _wasm("wasm-simd128", _WASM, fused=False),
        _wasm("wasm-relaxed", _WASM | {"relaxed-simd"}, fused=True),
        _gpu("sm_80", "ptx74"),
        _gpu("sm_89", "ptx84"),
        _gpu("sm_90a", "ptx84"),
        _gpu("sm_100a", "ptx87"),
    )
}


def get(name: str) -> Target:
    if name == "host":
        return host()
    if name not in NAMED:
        raise TargetError(f"unknown target {name!r}; known: host, {', '.join(NAMED)}")
    return NAMED[name]


def of_gpu(name: str, capability: Capability) -> Target:
    """The named target, if a GPU of this compute capability runs it. "host" names the latest target that it runs."""
    able = [t for t in NAMED.values() if t.system == GPU and runs(t.key, capability)]
    chosen = able[-1:] if name == "host" else [t for t in able if t.name == name]
    if not chosen:
        wanted = "the least target, sm_80" if name == "host" else f"target {name!r}"
        text = f"{wanted} is not for a GPU of compute capability {capability[0]}.{capability[1]}; it can run "
        raise TargetError(text + (", ".join(t.name for t in able) or "none"))
    return chosen[0]


def runnable(name: str) -> Target:
    """The named target, if this machine can run it."""
    return _within(get(name), host())


def _within(target: Target, here: Target) -> Target:
    if not target.within(here):
        lacks = ", ".join(sorted(target.features - here.features)) if target.arch == here.arch else target.arch
        lacks = lacks or target.system
        able = ", ".join(["host", *(t.name for t in NAMED.values() if t.within(here))])
        raise TargetError(f"target {target.name!r} needs {lacks}, which this CPU lacks; it can run {able}")
    return target


def host() -> Target:
    """This machine, restricted to the target that RELAXSERVE_TARGET names, if it names one."""
    lesser = flags.current().target
    return machine() if lesser in (None, "host") else _reduced(lesser)


@lru_cache
def _reduced(name: str) -> Target:
    try:
        return replace(_within(get(name), machine()), name="host")
    except TargetError as error:
        raise TargetError(f"RELAXSERVE_TARGET: {error}") from None


@lru_cache(maxsize=1)
def machine() -> Target:
    """This machine with all features of its CPU."""
    known = [t for t in NAMED.values() if t.arch == ARCH]
    if not known:
        raise TargetError(f"this machine is a {ARCH}; code is generated for {' and '.join({t.arch: None for t in NAMED.values()})}")
    least = known[0]
    # An operating system may report only what goes beyond its base, which on aarch64 is NEON.
    found = features() | (_NEON if ARCH == "aarch64" else frozenset[str]())
    if missing := least.features - found:
        raise TargetError(
            f"this CPU lacks {', '.join(sorted(missing))}; expected at least {least.name}: {', '.join(sorted(least.features))}"
        )
    return Target("host", ARCH, found, max(t.vector_bits for t in known if t.features <= found))
