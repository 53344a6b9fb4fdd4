"""Targets: the machines for which the compiler generates code.

A target is defined by its features and not by the name of a CPU: in virtual machines LLVM often detects a wrong name, but the right
features. A named target is a level of capability: a fixed set of features. The target `host` is this machine, with the features of its CPU
that a process may use, or with fewer features if RELAXSERVE_TARGET says so; for a GPU, `host` is the latest named target that the GPU can
run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from runtime import flags
from runtime.device.cpu.host import ARCH, features
from runtime.device.cuda.capability import Capability, runs

LINE_BYTES: Final = 64  # size of a cache line in bytes
LINUX: Final = "unknown-linux-gnu"
GPU: Final = "nvidia-cuda"


class TargetError(Exception):
    """A target is unknown, no back end makes code for it, or this machine or GPU cannot run it. Also raised if this machine's architecture
    has no targets, if its CPU lacks a feature of the architecture's baseline, and if the prefix of exported C names is invalid."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of machine, and how LLVM generates code for it. The code must run on every machine that has the features."""

    name: str
    arch: str  # LLVM's name: x86_64, aarch64, riscv64, wasm32, nvptx64
    features: frozenset[str]  # LLVM's names
    vector_bits: int  # width of the widest registers with arithmetic
    system: str = LINUX  # vendor, system and ABI: the part of LLVM's triple after the architecture
    has_fma: bool = True  # whether an instruction multiplies and adds with one rounding
    has_f16: bool = True  # whether instructions convert f16
    relocation: str = "pic"  # LLVM's relocation model
    code_model: str = "default"
    abi: str = ""  # LLVM's name for how calls pass floats, where the triple leaves this open
    cpu: str = ""  # LLVM's name of the processor, where the features do not determine the code

    @property
    def begins_early(self) -> bool:
        """Whether a kernel of this GPU may begin while those that were launched before it still run (programmatic dependent launch). The
        compiler uses this for sm_90a only."""
        return "sm_90a" in self.features

    @property
    def shared_bytes(self) -> int:
        """The number of bytes of shared memory that a block may use on every GPU that runs code for this target."""
        return next((num_bytes for name, num_bytes in _SHARED_BYTES.items() if name in self.features), _LEAST_SHARED_BYTES)

    @property
    def rounds_bf16(self) -> bool:
        """Whether code rounds f32 to bf16 by one instruction: to nearest, ties to even, with denormals kept. The instruction of x86 flushes
        denormals, so code for CPUs rounds by integer instructions, except where denormals may become zero."""
        return self.system == GPU

    @property
    def triple(self) -> str:
        return f"{self.arch}-{self.system}"

    @property
    def feature_string(self) -> str:
        return ",".join(f"+{f}" for f in sorted(self.features))

    @property
    def key(self) -> str:
        """A text that identifies the generated code: targets with equal keys get the same code, on every machine."""
        system = "" if self.system == LINUX else f"@{self.system}"
        return f"{self.arch}:{self.feature_string}{system}"

    @property
    def bf16_unit(self) -> str | None:
        """The name of the unit that multiplies bf16 faster than f32. None if the target has no such unit, and for GPUs."""
        return next((name for name, features in BF16_UNITS.items() if features <= self.features), None)

    @property
    def can_run_here(self) -> bool:
        """Whether this machine, or the target to which RELAXSERVE_TARGET reduces it, runs code for this target. Always False for GPUs."""
        return self.within(host())

    def within(self, other: Target) -> bool:
        """Return whether the machine `other` has the architecture, the system and all features of this target."""
        return self.arch == other.arch and self.system == other.system and self.features <= other.features

    def lanes(self, num_bytes: int) -> int:
        """Return the number of elements of `num_bytes` bytes in a register."""
        return self.vector_bits // (8 * num_bytes)


# The features of units that multiply bf16 faster than f32, by the name of the unit (docs/decisions/0008-where-bf16-is-multiplied.md).
BF16_UNITS: Final = {"amx": frozenset(["amx-bf16"]), "bf16": frozenset(["avx512bf16", "sse4a"])}

# Code for sm_80 also runs on GPUs of compute capability 8.6, 8.9 and 12.0, and code for sm_89 on those of 8.9 and 12.0. Blocks of these
# GPUs have the least shared memory.
_LEAST_SHARED_BYTES: Final = 99 << 10
_SHARED_BYTES: Final = {"sm_90a": 227 << 10, "sm_100a": 227 << 10}

# LLVM adds the features that these imply; for example, avx2 implies avx and sse.
_X86_V3: Final = frozenset(["avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt"])
_AVX512: Final = _X86_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16: Final = _AVX512 | {"avx512vnni", "avx512bf16"}
_AVX512_BF16_AMD: Final = _AVX512_BF16 | {"sse4a", "avx512vbmi"}
_AMX: Final = _AVX512_BF16 | {"avx512vbmi", "amx-tile", "amx-bf16", "amx-int8"}
_NEON: Final = frozenset(["fp-armv8", "neon"])
_NEON_DOT: Final = _NEON | {"fullfp16", "dotprod"}
_NEON_BF16: Final = _NEON_DOT | {"i8mm", "bf16"}
_RISCV: Final = frozenset(["m", "a", "f", "d", "c"])
_WASM: Final = frozenset(["simd128", "bulk-memory", "mutable-globals", "nontrapping-fptoint", "sign-ext"])


def _wasm(name: str, features: frozenset[str], *, has_fma: bool) -> Target:
    return Target(name, "wasm32", features, 128, system="unknown-unknown", has_fma=has_fma, has_f16=False, relocation="static")


def _gpu(name: str, ptx: str) -> Target:
    """Return the target of a GPU. `vector_bits` is the width in bits of a thread's widest memory access. Code for a name that ends in "a"
    runs only on GPUs of the compute capability in the name; other code also runs on GPUs of higher compute capability."""
    return Target(name, "nvptx64", frozenset([name, ptx]), 128, system=GPU, cpu=name)


# The first target of each architecture is its baseline.
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
        Target("aarch64-android", "aarch64", _NEON_DOT, 128, system="unknown-linux-android"),
        Target("riscv64", "riscv64", _RISCV, 128, has_f16=False, code_model="medium", abi="lp64d"),
        Target("riscv64-v", "riscv64", _RISCV | {"v"}, 128, has_f16=False, code_model="medium", abi="lp64d"),
        _wasm("wasm-simd128", _WASM, has_fma=False),
        _wasm("wasm-relaxed", _WASM | {"relaxed-simd"}, has_fma=True),
        _gpu("sm_80", "ptx74"),
        _gpu("sm_89", "ptx84"),
        _gpu("sm_90a", "ptx84"),
        _gpu("sm_100a", "ptx87"),
    )
}


def get(name: str) -> Target:
    """Return the named target, or, for "host", the result of `host`, which may raise TargetError. Raise TargetError for an unknown name."""
    if name == "host":
        return host()
    if name not in NAMED:
        raise TargetError(f"unknown target {name!r}; known: host, {', '.join(NAMED)}")
    return NAMED[name]


def of_gpu(name: str, capability: Capability) -> Target:
    """Return the named target if a GPU of this compute capability can run it. "host" is the latest target that the GPU can run. Raise
    TargetError if it cannot run the target, or any target."""
    able = gpu_targets(capability)
    chosen = able[-1:] if name == "host" else [t for t in able if t.name == name]
    if not chosen:
        gpu = f"a GPU of compute capability {capability[0]}.{capability[1]}"
        runs_here = f"it can run {', '.join(t.name for t in able)}" if able else "it can run no target; the lowest one is sm_80"
        raise TargetError(f"{gpu} cannot run target {name!r}; {runs_here}")
    return chosen[0]


def gpu_targets(capability: Capability) -> list[Target]:
    """Return the named targets that a GPU of this compute capability can run, in order, with the latest at the end."""
    return [t for t in NAMED.values() if t.system == GPU and runs(t.key, capability)]


def runnable(name: str) -> Target:
    """Return the target of this name, which may be "host". Raise TargetError if the name is unknown, or if this machine cannot run the
    target."""
    return _within(get(name), host())


def _within(target: Target, here: Target) -> Target:
    """Return the target if the machine `here` can run it. Otherwise raise TargetError."""
    if not target.within(here):
        lacks = ", ".join(sorted(target.features - here.features)) if target.arch == here.arch else target.arch
        lacks = lacks or target.system
        able = ", ".join(["host", *(t.name for t in NAMED.values() if t.within(here))])
        raise TargetError(f"target {target.name!r} needs {lacks}, which this CPU lacks; it can run {able}")
    return target


def host() -> Target:
    """Return this machine's target. The variable RELAXSERVE_TARGET can reduce it to the features of a named target, under the name `host`.
    Raise TargetError if this machine is not supported, or if it cannot run the named target."""
    lesser = flags.current().target
    return machine() if lesser in (None, "host") else _reduced(lesser)


@lru_cache
def _reduced(name: str) -> Target:
    """Return the named target under the name `host`. Raise TargetError if this machine cannot run it."""
    try:
        return replace(_within(get(name), machine()), name="host")
    except TargetError as error:
        raise TargetError(f"RELAXSERVE_TARGET: {error}") from None


@lru_cache(maxsize=1)
def machine() -> Target:
    """Return this machine with all features of its CPU that a process may use. Raise TargetError if no code is generated for its
    architecture, or if a feature of the architecture's baseline is missing."""
    known = [t for t in NAMED.values() if t.arch == ARCH]
    if not known:
        raise TargetError(f"this machine is a {ARCH}; code is generated for {' and '.join({t.arch: None for t in NAMED.values()})}")
    least = known[0]
    # The detected features may lack some that every CPU of the architecture has: on aarch64, NEON.
    found = features() | (_NEON if ARCH == "aarch64" else frozenset[str]())
    if missing := least.features - found:
        raise TargetError(
            f"this CPU lacks {', '.join(sorted(missing))}; expected at least {least.name}: {', '.join(sorted(least.features))}"
        )
    return replace(least, name="host", features=found, vector_bits=max(t.vector_bits for t in known if t.features <= found))
