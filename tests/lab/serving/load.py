"""`python -m tests.lab load`: memory and time for loading a model, measured on a worker process that is started as the server starts it.
This process reads the tokenizer meanwhile, as the server does.

    first start    with an empty cache: the worker compiles, reads and prepares all weights
    later start    with a full cache
    cold start     with a full cache on disk, but no packed weights in memory. It measures which share of them is read before the answer
                   to a prompt of one token begins. Experts that no token chose are not read, so a mixture may be larger than memory

Resident memory is compared with the plan: weights, arena, KV pages, and WORKER_BYTES for the process itself. While a checkpoint is loaded,
the plan also includes one of its shards. Resident memory includes only those pages of mapped files that were accessed.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import mmap
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import save_file

from compiler.frontend.weights import open_safetensors
from deploy import demo
from deploy.bench.checkpoint import PREFIX, model_folder
from deploy.bench.measure import Figure, report
from deploy.bench.synthetic import SHAPES
from deploy.cache import Part, kept
from deploy.model_loading.plan import WORKER_BYTES
from deploy.model_loading.tokenizer import load_tokenizer
from deploy.serve import WORKER
from server.messages import Load, Ready, SamplingParams, Submit
from server.workers.supervisor import Supervisor

START_S = 1.5  # goal for a model of half a billion parameters
START_MODEL = f"{PREFIX}0.5b"
PROMPT = tuple(range(3, 35))
NUM_NEW = 16
KV_BYTES = 64 << 20  # small, because unwritten pages take no memory, and a large plan for pages would hide an excess of other parts


@dataclass(frozen=True, slots=True)
class Start:
    ready: Ready
    first_token_s: float  # seconds from the start of the process to the first token
    peak_bytes: int  # largest resident memory until the first token
    serving_bytes: int  # resident memory after NUM_NEW tokens
    packed_share: float  # share of the packed weights that the page cache holds when the first token arrives

    @property
    def planned_bytes(self) -> int:
        return self.ready.total_bytes + WORKER_BYTES


async def start(load: Load, prompt: tuple[int, ...] = PROMPT) -> Start:
    began_s = time.perf_counter()
    worker = Supervisor(WORKER, load)
    ready, _ = await asyncio.gather(worker.start(), asyncio.to_thread(load_tokenizer, load.source))
    try:
        first_token_s, peak_bytes, packed_share = 0.0, 0, 0.0
        params = SamplingParams(NUM_NEW, temperature=0.0, ignore_eos=True)
        async for _ in worker.generate(Submit("load", prompt, params)):
            if not first_token_s:
                first_token_s, peak_bytes = time.perf_counter() - began_s, resident(worker, "VmHWM")
                packed_share = cached_share(packed_weights())
        return Start(ready, first_token_s, peak_bytes, resident(worker, "VmRSS"), packed_share)
    finally:
        await worker.stop()


def resident(worker: Supervisor, field: str) -> int:
    """Return a field of the worker's /proc status in bytes: `VmRSS` is its resident memory, `VmHWM` the peak of its resident memory."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{field}:"))


def packed_weights() -> Path:
    """Return the file of packed weights. The cache has no other."""
    folder = kept()
    assert folder is not None
    (path,) = (item.paths[0] for item in folder.items() if item.part is Part.WEIGHTS)
    return path


def cached_share(path: Path) -> float:
    """Return the share of a file's pages that the page cache holds."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        pages = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        first = ctypes.c_ubyte.from_buffer(mapping)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapping)), pages)
        del first  # otherwise the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return sum(page & 1 for page in pages) / len(pages)


def evict(path: Path) -> None:
    """Remove a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def shard(folder: Path, num_shards: int) -> None:
    """Split model.safetensors into shards, as large models on the hub are stored."""
    whole = folder / "model.safetensors"
    source = open_safetensors(whole)
    names = sorted(source.tensors)
    total = sum(info.num_bytes for info in source.tensors.values())
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    place = 0
    for name in names:
        shards[place * num_shards // total].append(name)
        place += source.tensors[name].num_bytes
    files = {f"model-{i + 1:05}-of-{num_shards:05}.safetensors": part for i, part in enumerate(shards) if part}
    for file, part in files.items():
        save_file({name: source.read(name) for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    whole.unlink()


def measure(folder: Path, quantize: str, *, start_goal_s: float | None, num_starts: int) -> list[Figure]:
    largest_shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    load = Load("bench", str(folder), quantize, kv_cache_bytes=KV_BYTES)
    first = asyncio.run(start(load))
    seconds = [asyncio.run(start(load)) for _ in range(num_starts)]
    evict(packed_weights())
    cold = asyncio.run(start(load, PROMPT[:1]))
    second = min(seconds, key=lambda s: s.first_token_s)  # slower starts include interruptions by other programs
    peak_bytes, serving_bytes = max(first.peak_bytes, second.peak_bytes), max(first.serving_bytes, second.serving_bytes)
    ready = first.ready
    parts = f"weights {_mib(ready.weights_bytes)}, arena {_mib(ready.arena_bytes)}, KV pages {_mib(ready.kv_cache_bytes)}"
    return [
        Figure("resident memory while serving", serving_bytes / 2**20, "MiB", first.planned_bytes / 2**20, note=parts),
        Figure(
            "peak of resident memory while loading",
            peak_bytes / 2**20,
            "MiB",
            (first.planned_bytes + largest_shard) / 2**20,
            note=f"largest shard {_mib(largest_shard)}",
        ),
        Figure("time to first token, first start", first.first_token_s, "s", note=f"of which {ready.compile_s:.2f} s compiling"),
        Figure(
            "time to first token, later start",
            second.first_token_s,
            "s",
            start_goal_s,
            note=f"best of {num_starts} starts; of which {second.ready.load_s:.2f} s loading",
        ),
        Figure(
            "share of the packed weights read before the first token, cold start",
            cold.packed_share,
            "",
            note=f"first token after {cold.first_token_s:.2f} s",
        ),
    ]


@contextmanager
def empty_cache() -> Generator[None]:
    """Give workers an empty cache, by an environment variable that they inherit."""
    before = os.environ.get("RELAXSERVE_CACHE")
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        os.environ["RELAXSERVE_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["RELAXSERVE_CACHE"]
            if before is not None:
                os.environ["RELAXSERVE_CACHE"] = before


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic = ", ".join(PREFIX + name for name in SHAPES)
    parser.add_argument("--model", default=START_MODEL, help=f"{demo.NAME}, a path to safetensors, {synthetic}")
    parser.add_argument("--quantize", default="bf16")
    parser.add_argument("--shards", type=int, default=4, help="number of files of a synthetic model")
    parser.add_argument("--starts", type=int, default=3, help="number of starts from the cache")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    goal = START_S if options.model == START_MODEL else None
    with model_folder(options.model) as folder, empty_cache():
        if options.model.startswith(PREFIX):
            shard(folder, options.shards)
        figures = measure(folder, options.quantize, start_goal_s=goal, num_starts=options.starts)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
