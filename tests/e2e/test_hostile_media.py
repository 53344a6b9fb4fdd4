"""Mutated images and recordings, sent to a server that streams answers meanwhile: no process ends, no stream waits, nothing is left behind,
and every answer is 200 or names the part at fault.

A stream waits while the front or the worker does something else. The machine may be busy with other programs, so waits are measured in
processor time: of the front's thread while a request to `/health/live` waits, and of the worker's busiest thread between two tokens of a
stream, which is the pause that `max_gap_ms` bounds, on a machine that does nothing else. The client may read late, so that several steps
count as one. Files that were sent during a long wait are therefore sent again, each alone, and only those that are slow each time count.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import DemoServer, children_of, descendants_of, serving_demo, workers_of
from tests.golden.listening import SUBJECTS as LISTENERS
from tests.golden.vision import SUBJECTS as SEERS
from tests.process_states import resident_bytes
from tests.server.images.files import data_url
from tests.server.mutations import Mutated, bomb, images, mutated, recordings

MOST_MS = 50.0
AT_ONCE = 12
ROUNDS = 5
WARM_SHARE, MOST_WARM = 0.5, 1000  # files after which all processes have allocated what they need
MOST_GROWTH_BYTES = 32 << 20  # of each process, for all further files
# Pages take memory when they are first written: a small KV cache is full after 600 files, so that later growth is none of its own.
OPTIONS = ("--quantize", "f32", "--max-image-pixels", "1000000", "--max-audio-s", "8", "--kv-cache-bytes", "4M")
pytestmark = pytest.mark.xdist_group("hostile media")


@dataclass(frozen=True, slots=True)
class Kind:
    """Images or recordings, and the models that read them."""

    name: str
    models: tuple[str, ...]
    folders: tuple[Path, ...]
    files: Callable[[], Mapping[str, bytes]]
    code: str  # code of the error
    part: Callable[[bytes], Mapping[str, Any]]
    where: str = "messages[0].content[0]"


def _audio_part(data: bytes) -> Mapping[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data_url(data).partition(",")[2], "format": "wav"}}


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "images",
            ("idefics3", "qwen2_vl"),
            tuple(SEERS[name].folder for name in ("idefics3", "qwen2_vl")),
            images,
            "invalid_image",
            lambda data: {"type": "image_url", "image_url": {"url": data_url(data)}},
        ),
        Kind("recordings", ("voxtral",), (LISTENERS["voxtral"].folder,), recordings, "invalid_audio", _audio_part),
    )
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def server(cache_folder: Path, kind: Kind) -> Iterator[DemoServer]:
    with serving_demo(cache_folder, *map(str, kind.folders), *OPTIONS) as server:
        yield server


# --- what the server's processes use ------------------------------------------------------------------------------------------


def thread_ms(*pids: int) -> dict[str, float]:
    """Return the processor time that each thread of these processes has used, in milliseconds."""
    found: dict[str, float] = {}
    for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
        with suppress(OSError):  # the thread has ended
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e6
    return found


def front_ms(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


@dataclass(frozen=True, slots=True)
class Use:
    """The memory of a server's processes while it answers nothing."""

    front_bytes: int
    worker_bytes: int
    helper_bytes: int  # of the processes from which those of single files are forked
    num_files: int  # open files of the front
    num_processes: int

    @staticmethod
    def of(pid: int) -> Use:
        workers = workers_of(pid)
        helpers = [child for child in children_of(pid) if b"server.isolated" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return Use(
            resident_bytes(pid),
            sum(map(resident_bytes, workers)),
            sum(map(resident_bytes, helpers)),
            len([*Path(f"/proc/{pid}/fd").iterdir()]),
            len(descendants_of(pid)),
        )


# --- waits ----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Waits:
    """Waits longer than MOST_MS of processor time, as (begin, end, ms), and the longest ones."""

    long: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    front_ms: float = 0.0
    worker_ms: float = 0.0
    num_tokens: int = 0
    num_probes: int = 0

    def add(self, began_s: float, ms: float) -> None:
        if ms > MOST_MS:
            self.long.append((began_s, time.monotonic(), ms))

    def worst_ms(self, began_s: float, ended_s: float) -> float:
        return max((ms for begin, end, ms in self.long if end >= began_s and begin <= ended_s), default=0.0)


@asynccontextmanager
async def watching(server: DemoServer, client: httpx.AsyncClient, models: Sequence[str]) -> AsyncGenerator[Waits]:
    """Read a stream of each model and send probes, until the block ends."""
    waits, workers = Waits(), workers_of(server.pid)
    running = asyncio.Event()

    async def stream(model: str) -> None:
        body = {"model": model, "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 1.0}
        while True:
            last: dict[str, float] = {}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                began_s = time.monotonic()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = thread_ms(*workers)
                    ms = max(used - last.get(name, used) for name, used in now.items())
                    waits.add(began_s, ms)
                    waits.worker_ms, waits.num_tokens = max(waits.worker_ms, ms), waits.num_tokens + 1
                    last, began_s = now, time.monotonic()
                    running.set()

    async def probe() -> None:
        while True:
            began_s, before = time.monotonic(), front_ms(server.pid)
            (await client.get("/health/live")).raise_for_status()
            ms = front_ms(server.pid) - before
            waits.add(began_s, ms)
            waits.front_ms, waits.num_probes = max(waits.front_ms, ms), waits.num_probes + 1
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(one) for one in (*map(stream, models), probe())]
    try:
        done, _ = await asyncio.wait([*tasks, asyncio.create_task(running.wait())], return_when=asyncio.FIRST_COMPLETED, timeout=120)
        assert running.is_set(), [task.exception() for task in done]
        yield waits
        assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the campaign ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sent:
    file: Mutated
    model: str
    began_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    message: str = ""


async def send(client: httpx.AsyncClient, kind: Kind, sent: Sent) -> None:
    content = [kind.part(sent.file.data), {"type": "text", "text": "What is it?"}]
    body = {"model": sent.model, "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    sent.began_s = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body)
    sent.ended_s, sent.status = time.monotonic(), answer.status_code
    if sent.status != 200:
        error = answer.json()["error"]
        sent.message = error["message"]
        assert (sent.status, error["code"]) in ((400, kind.code), (400, "context_length_exceeded")), (sent.file.name, error)
        assert kind.where in sent.message, (sent.file.name, error)


async def slow_ones(server: DemoServer, client: httpx.AsyncClient, kind: Kind, all_sent: Sequence[Sent], waits: Waits) -> list[str]:
    """Send the files again during which something waited, each alone. Return those during which it waits each time."""
    suspects = [sent for sent in all_sent if waits.worst_ms(sent.began_s, sent.ended_s)]
    for _ in range(ROUNDS):
        if not suspects:
            break
        left: list[Sent] = []
        async with watching(server, client, kind.models) as again:
            for sent in suspects:
                await asyncio.sleep(0.05)
                await send(client, kind, sent)
                await asyncio.sleep(0.05)
                if again.worst_ms(sent.began_s, sent.ended_s):
                    left.append(sent)
        suspects = left
    return [f"{sent.file.name}: {sent.status} {sent.message}" for sent in suspects]


@pytest.mark.parametrize("count", [48, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files(server: DemoServer, kind: Kind, count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    files, rng = kind.files(), random.Random(f"{kind.name} {count}")
    all_sent = [Sent(mutated(files, rng), rng.choice(kind.models)) for _ in range(count)]
    num_warm = min(MOST_WARM, round(WARM_SHARE * count))
    workers = workers_of(server.pid)

    async def campaign() -> tuple[Use, Use, Waits, list[str]]:
        # httpx may close a connection that it is about to use again, if the machine is so busy that it has expired meanwhile
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=False, limits=limits) as client:

            async def send_all(part: Sequence[Sent]) -> None:
                left = iter(part)

                async def some() -> None:
                    for sent in left:
                        await send(client, kind, sent)

                await asyncio.gather(*(some() for _ in range(AT_ONCE)))

            async with watching(server, client, kind.models) as waits:
                await send_all(all_sent[:num_warm])
                before = Use.of(server.pid)
                await send_all(all_sent[num_warm:])
                after = Use.of(server.pid)
            slow = await slow_ones(server, client, kind, all_sent, waits)
            for name, data in files.items():
                for model in kind.models:
                    whole = Sent(Mutated(name, data), model)
                    await send(client, kind, whole)
                    assert whole.status == 200, (name, model, whole.message)
            return before, after, waits, slow

    before, after, waits, slow = asyncio.run(campaign())
    found = {
        "kind": kind.name,
        "count": count,
        "refused": sum(sent.status != 200 for sent in all_sent),
        "slow": slow,
        "before": asdict(before),
        "after": asdict(after),
        "num_long": len(waits.long),
        **{name: getattr(waits, name) for name in ("front_ms", "worker_ms", "num_tokens", "num_probes")},
    }
    (tmp_path_factory.getbasetemp() / f"hostile-{kind.name}-{count}.json").write_text(json.dumps(found, indent=1))
    assert not slow, slow
    assert workers_of(server.pid) == workers  # none was replaced
    assert 0.2 * count < found["refused"] < count  # some are refused, some are decoded
    assert waits.num_tokens > count / 10 and waits.num_probes > count / 10
    for name in ("front_bytes", "worker_bytes", "helper_bytes"):
        assert getattr(after, name) < getattr(before, name) + MOST_GROWTH_BYTES, found
    assert after.num_files <= before.num_files + AT_ONCE and after.num_processes <= before.num_processes + AT_ONCE


@pytest.mark.parametrize("kind", ["images"], indirect=True)
def test_bombs_are_refused_before_their_pixels_are_decoded(server: DemoServer, kind: Kind) -> None:
    """Each image declares more pixels than may be decoded, and its data contain all of them."""
    with httpx.Client(base_url=server.url, timeout=300, verify=False) as client:
        for format, edge in (("PNG", 20_000), ("GIF", 8_000), ("JPEG", 8_000), ("WEBP", 8_000)):
            content = [kind.part(bomb(format, edge)), {"type": "text", "text": "What is it?"}]
            answer = client.post("/v1/chat/completions", json={"model": kind.models[0], "messages": [{"role": "user", "content": content}]})
            assert answer.status_code == 400
            assert f"it has {edge} x {edge} pixels; expected at most 1000000 (max_image_pixels)" in answer.json()["error"]["message"]
