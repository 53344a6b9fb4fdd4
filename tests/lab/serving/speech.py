"""`python -m tests.lab speech`: compare Whisper in relaxserve, over HTTP, with faster-whisper in int8 and with whisper.cpp in f16.

All engines transcribe the same ten minutes of speech (spoken.py) on the same cores with the same number of threads, and decode greedily.
In each round, every engine transcribes one file, or eight files. Figures are quotients of processor times; notes have wall times, too.
relaxserve gets eight files as eight requests at once. faster-whisper takes them one after the other, or as one batch of windows;
whisper.cpp has no batches. The numbers of wrong words of all engines are reported, with those of relaxserve in f32.

relaxserve's processor time is that of all its processes: it receives, decodes and answers over HTTP, while peers read files.
`--peer-python`, or the variable PEER_PYTHON, is an interpreter that has faster-whisper and pywhispercpp.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

import httpx

from deploy.bench.measure import Figure, report
from deploy.model_loading.origins import here
from runtime.device.cpu.cores import available_cores
from server.models.processes import usage_of
from server.settings import SettingsError
from tests.conftest import greeting
from tests.lab.peers.ggml_whisper import write_ggml
from tests.lab.serving.spoken import passages, write_files
from tests.lab.serving.start import RELAXSERVE
from tests.real.speech.errors import errors, words_of

GOALS = {1: 1.3, 8: 3.0}  # number of files -> least quotient of a peer's processor time and relaxserve's
EXACT = "f32"  # the format of weights with which `--quantize` is compared
MOST_FURTHER_ERRORS = 0.002  # wrong words beyond those of EXACT, as a share of all words
PEERS = ("faster-whisper", "whisper.cpp")
WAYS = {"in turn": "files in turn", "as a batch": "files as a batch"}
PATIENCE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Run:
    texts: list[str]
    wall_s: float
    cpu_s: float


class Engine(Protocol):
    def run(self, files: Sequence[Path]) -> Run: ...


# --- relaxserve ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ours:
    pid: int
    http: httpx.Client

    def run(self, files: Sequence[Path]) -> Run:
        began_s, spent_s = time.perf_counter(), processor_s(self.pid)
        with ThreadPoolExecutor(len(files)) as pool:
            texts = [*pool.map(self._transcribed, files)]
        return Run(texts, time.perf_counter() - began_s, processor_s(self.pid) - spent_s)

    def _transcribed(self, file: Path) -> str:
        form = {"language": "en", "response_format": "verbose_json"}
        answer = self.http.post("/v1/audio/transcriptions", data=form, files={"file": file.read_bytes()})
        return answer.raise_for_status().json()["text"]


def processor_s(pid: int) -> float:
    """Return the processor time of a process and its descendants, in seconds, with that of descendants that have ended."""
    return usage_of(pid).cpu_s


@contextmanager
def ours(model: Path, quantize: str, cores: Sequence[int]) -> Generator[Ours]:
    command = [*RELAXSERVE, "serve", f"{model}=speech", "--port", "0", "--quantize", quantize]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=partial(_pin, cores)) as process:
        try:
            url, _ = greeting(process)
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
                yield Ours(process.pid, http)
        finally:
            process.terminate()
            process.communicate()


def _pin(cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)


# --- peers -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    process: subprocess.Popen[str]
    log: IO[str]
    ways: Sequence[str]

    def by(self, way: str) -> Engine:
        return _PeerWay(self, way)

    def ask(self, message: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)
        return _answer(self.process, self.log)


@dataclass(frozen=True, slots=True)
class _PeerWay:
    peer: Peer
    way: str

    def run(self, files: Sequence[Path]) -> Run:
        return Run(**self.peer.ask({"way": self.way, "files": [*map(str, files)]}))


@contextmanager
def peer(python: str, engine: str, model: Path, cores: Sequence[int]) -> Generator[Peer]:
    command = [python, "-m", "tests.lab.peers.speech", engine, str(model), str(len(cores))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "OMP_WAIT_POLICY": "passive"}
    pin, pipe = partial(_pin, cores), subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, text=True, env=environment, preexec_fn=pin, stdin=pipe, stdout=pipe, stderr=log) as process,
    ):
        try:
            yield Peer(process, log, _answer(process, log)["ways"])
        finally:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[str], log: IO[str]) -> Any:
    """Return the next line of JSON. A peer may print other lines."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    log.seek(0)
    raise SettingsError(f"the peer ended: {log.read()[-2000:]}")


# --- figures ---------------------------------------------------------------------------------------------------------------


def measure(model: Path, options: argparse.Namespace) -> list[Figure]:
    spoken, cores, quantize = passages()[: options.passages], available_cores()[-options.threads :], options.quantize
    with tempfile.TemporaryDirectory(prefix="relaxserve-speech-") as name, ExitStack() as stack:
        files = write_files(Path(name), spoken)
        ggml = Path(name) / "model.bin"
        write_ggml(ggml, model)
        paths = {"faster-whisper": model, "whisper.cpp": ggml}
        peers = {engine: stack.enter_context(peer(options.peer_python, engine, paths[engine], cores)) for engine in options.peer or PEERS}
        own = stack.enter_context(ours(model, quantize, cores))
        figures = [figure for count in GOALS if count <= len(files) for figure in speeds(own, peers, files[:count], options.rounds)]
        engines: dict[str, Engine] = {quantize: own} | {f"{e}, {WAYS[w]}": p.by(w) for e, p in peers.items() for w in p.ways}
        told = {name: _all_texts(engine, files) for name, engine in engines.items()}
        with ours(model, EXACT, cores) as exact:
            told[EXACT] = _all_texts(exact, files)
    return figures + accuracies(told, quantize, [passage.text for passage in spoken])


def speeds(own: Ours, peers: Mapping[str, Peer], files: Sequence[Path], rounds: int) -> list[Figure]:
    """Let all engines transcribe the files, one engine after the other, in several rounds. Return the quotients of processor times."""
    at_once = "one file" if len(files) == 1 else f"{len(files)} files"
    others = {(name, way): each.by(way) for name, each in peers.items() for way in each.ways if len(files) > 1 or way == "in turn"}
    engines: list[Engine] = [own, *others.values()]
    for engine in engines:
        engine.run(files[:1])  # warm up
    found = [[engine.run(files) for engine in engines] for _ in range(rounds)]
    figures: list[Figure] = []
    for number, (name, way) in enumerate(others, 1):
        quotient = median(runs[number].cpu_s / runs[0].cpu_s for runs in found)
        cpu, wall = ([median(getattr(runs[at], unit) for runs in found) for at in (0, number)] for unit in ("cpu_s", "wall_s"))
        note = f"processor {cpu[0]:.2f} and {cpu[1]:.2f} s, wall {wall[0]:.2f} and {wall[1]:.2f} s"
        how = "" if len(files) == 1 else f", {WAYS[way]}"
        figures.append(Figure(f"{at_once}: speed / {name}'s{how}", quotient, "", GOALS[len(files)], at_least=True, note=note))
    return figures


def _all_texts(engine: Engine, files: Sequence[Path]) -> list[str]:
    most = max(GOALS)
    return [text for at in range(0, len(files), most) for text in engine.run(files[at : at + most]).texts]


def accuracies(told: Mapping[str, Sequence[str]], quantize: str, texts: Sequence[str]) -> list[Figure]:
    num_words = sum(len(words_of(text)) for text in texts)
    wrong = {name: sum(map(errors, found, texts)) for name, found in told.items()}
    figures = [Figure(f"{name}: wrong words", count, "", note=f"of {num_words}") for name, count in wrong.items()]
    further = (wrong[quantize] - wrong[EXACT]) / num_words
    return [*figures, Figure(f"{quantize}: further wrong words, of all words", further, "", MOST_FURTHER_ERRORS)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab speech", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="whisper-base", help="a name of the catalogue that is on this machine, or a folder")
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--threads", type=int, default=len(available_cores()), help="cores of each engine (all)")
    parser.add_argument("--passages", type=int, default=len(passages()), help="use only the first ones")
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeatable (all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each measurement")
    parser.add_argument(
        "--peer-python", default=os.environ.get("PEER_PYTHON", sys.executable), help="interpreter that has the peers (PEER_PYTHON)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    model = here(options.model) or Path(options.model)
    if not model.is_dir():
        raise SettingsError(f"{options.model} is not on this machine; `relaxserve pull {options.model}` downloads it")
    report(measure(model, options), as_json=options.json)


if __name__ == "__main__":
    main()
