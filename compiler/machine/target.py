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

LINE_BYTES: Final = 64  # of a cache


class TargetError(Exception):
    """A target that is not known, or a machine that nothing can be generated for."""


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    arch: str  # as LLVM names it: x86_64, aarch64
    features: frozenset[str]  # in LLVM's spelling
    vector_bits: int  # of the widest registers that arithmetic works on

    @property
    def triple(self) -> str:
        return f"{self.arch}-unknown-linux-gnu"

    @property
    def feature_string(self) -> str:
        return ",".join(f"+{f}" for f in sorted(self.features))

    @property
    def key(self) -> str:
        """Equal for targets that get equal code, on any machine and day."""
        return f"{self.arch}:{self.feature_string}"

    @property
    def can_run_here(self) -> bool:
        return self.within(host())

    def within(self, other: Target) -> bool:
        """Whether the other machine runs code for this one."""
        return self.arch == other.arch and self.features <= other.features

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
    )
}


def get(name: str) -> Target:
    if name == "host":
        return host()
    if name not in NAMED:
        raise TargetError(f"unknown target {name!r}; known: host, {', '.join(NAMED)}")
    return NAMED[name]


def runnable(name: str) -> Target:
    """The same, where this machine can run it."""
    return _within(get(name), host())


def _within(target: Target, here: Target) -> Target:
    if not target.within(here):
        lacks = target.arch if target.arch != here.arch else ", ".join(sorted(target.features - here.features))
        able = ", ".join(["host", *(t.name for t in NAMED.values() if t.within(here))])
        raise TargetError(f"target {target.name!r} needs {lacks}, which this CPU lacks; it can run {able}")
    return target


def host() -> Target:
    """This machine, or the lesser one that RELAXSERVE_TARGET names."""
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
    """This machine with all that its CPU can do."""
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
