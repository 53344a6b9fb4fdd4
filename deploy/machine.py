"""Survey this machine: processor, cores, memory, disk, GPUs, and the optional packages that are installed."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from compiler.machine.target import Target, TargetError, host, of_gpu
from deploy.cache import Kept
from runtime import flags
from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.system_memory import SystemMemory, system_memory
from runtime.device.cuda.card import Found, found_cards
from runtime.errors import DamagedFile, NoDevice, UnsafeCache

# CPU features that kernels use, in the order in which `relaxserve doctor` shows them: those that multiply fastest come first.
NOTABLE = {
    "x86_64": ("amx-bf16", "amx-int8", "avx512bf16", "avx512vnni", "avx512f", "avxvnni", "avx2", "fma", "f16c"),
    "aarch64": ("i8mm", "bf16", "dotprod", "fullfp16", "neon"),
}
# extra of the package -> the module that it installs, its purpose. Dynamo is left out, because it needs an environment of its own.
EXTRAS = {
    "hub": ("huggingface_hub", "load models by hub id"),
    "cuda": ("pycuda", "run models on NVIDIA GPUs"),
    "otel": ("opentelemetry.sdk", "send traces of requests"),
    "fleet": ("zmq", "publish events of prefix caches"),
    "media": ("av", "read images and compressed audio"),
    "ray": ("ray", "run a fleet on Ray Serve"),
}


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """The cache folder, and the disk with the folder, or with the nearest existing folder above it."""

    path: Path
    refusal: str  # why loads are refused with this folder, for example because others can write to it; "": they are not
    writable: bool  # whether this user can write to the folder, or to the nearest folder above it that exists
    used_bytes: int  # bytes of all files in the folder
    free_bytes: int  # free bytes of the disk


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about this machine that `relaxserve doctor` shows."""

    processor: str
    target: Target
    num_cores: int  # number of cores that this process may use
    num_cores_present: int  # number of all cores of the machine
    memory: SystemMemory
    huge_pages: str  # transparent huge pages: always, madvise, never, or unknown
    cache: CacheFolder
    gpus: tuple[str, ...]  # each GPU in words
    gpu_problem: str  # why models cannot run on any GPU; "" if they can run on one, or if the driver finds none
    missing_extras: tuple[str, ...]  # names of the extras of the package that are not installed

    @property
    def features(self) -> tuple[str, ...]:
        """The notable features that the processor has."""
        return tuple(f for f in NOTABLE.get(self.target.arch, ()) if f in self.target.features)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(available_cores())


def free_memory() -> int:
    """Return the bytes of memory that this process may allocate."""
    return system_memory().available_bytes


def survey() -> Machine:
    """Look at this machine now."""
    gpus, gpu_problem = _gpus()
    return Machine(
        processor=_processor(),
        target=host(),
        num_cores=num_cores(),
        num_cores_present=os.cpu_count() or 1,
        memory=system_memory(),
        huge_pages=_huge_pages(),
        cache=_cache_folder(flags.current().cache),
        gpus=gpus,
        gpu_problem=gpu_problem,
        missing_extras=tuple(name for name, (module, _) in EXTRAS.items() if not _is_installed(module)),
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of the module is missing
        return False


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _text(Path("/proc/cpuinfo")).splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _huge_pages() -> str:
    """Return the current setting of transparent huge pages, which the kernel marks with brackets."""
    return next((w.strip("[]") for w in _text(Path("/sys/kernel/mm/transparent_hugepage/enabled")).split() if w.startswith("[")), "unknown")


def _cache_folder(path: Path) -> CacheFolder:
    """Describe the cache folder, and read the size of every file in it."""
    there = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))  # `exists` is false if this user may not look
    used = sum(map(_num_bytes, path.rglob("*"))) if there == path else 0
    refusal = ""
    if not flags.current().no_cache:
        try:
            cache = Kept(path)
            cache.require_private()
            cache.require_keys()
        except (UnsafeCache, DamagedFile) as error:
            refusal = str(error)
    return CacheFolder(path, refusal, there.is_dir() and os.access(there, os.W_OK | os.X_OK), used, shutil.disk_usage(there).free)


def _num_bytes(file: Path) -> int:
    """Return the size of a regular file. Return 0 for anything else, and if another process has removed the file."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _gpus() -> tuple[tuple[str, ...], str]:
    """Describe each GPU. Also return why models cannot use any of them, or "" if at least one is usable or the driver finds none. Without a
    usable driver or the extra `cuda`, list the GPUs that the kernel knows."""
    try:
        cards = found_cards()
    except NoDevice as error:
        return _gpus_of_the_system(), str(error)
    refusals = [_refusal(card) for card in cards]
    return tuple(map(str, cards)), "" if "" in refusals else next(iter(refusals), "")


def _refusal(card: Found) -> str:
    """Return the reason why models cannot run on the GPU, or "" if they can."""
    try:
        of_gpu("host", card.capability)
    except TargetError as error:
        return str(error)
    return ""


def _gpus_of_the_system() -> tuple[str, ...]:
    """List the GPUs that the kernel driver knows, without loading any library."""
    found = [_text(folder / "information") for folder in sorted(Path("/proc/driver/nvidia/gpus").glob("*"))]
    return tuple(next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Model")), "GPU") for text in found)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
