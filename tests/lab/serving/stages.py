"""`python -m tests.lab stages`: what it costs to compute a model in two processes on the same cores.

The model in one process and the model in stages generate the same tokens for 32 sequences, in turns, through the same engine. A hop sends
the inputs of a step of 32 tokens to another process, over TCP on this machine, and a residual stream of 2048 floats per token back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np

from deploy import demo
from deploy.bench.measure import Figure, report
from deploy.model_loading.load import load_model
from server.engine.overlap import OverlappedEngine
from server.engine.worker import LoadedModel
from server.messages import FromWorker, Load, SamplingParams, Submit, Tokens
from server.stages.link import Link, StageLost
from server.stages.messages import Run, Stream

NUM_SEQS, WIDTH = 32, 2048
NUM_HOPS = 2000


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab stages", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=demo.MODEL)
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    load = Load("m", str(options.model), options.quantize, max_batch=NUM_SEQS, max_context=1024)
    one = load_model(load, lambda _part, _fraction: None)
    several = load_model(msgspec.structs.replace(load, stages=("local",) * options.stages), lambda _part, _fraction: None)
    assert several.relay is not None
    ratios: list[float] = []
    rates: list[float] = []
    for _ in range(options.turns):
        (one_s, one_tokens), (several_s, several_tokens) = (_generate(model, options.tokens) for model in (one, several))
        assert one_tokens == several_tokens, "both forms generate the same tokens"
        ratios.append(one_s / several_s)
        rates.append(NUM_SEQS * options.tokens / one_s)
    several.relay.close()
    hops_ms = sorted(1000 * hop_s for hop_s in hops())
    report(
        [
            Figure("one process", statistics.median(rates), "tokens/s"),
            Figure(
                f"{options.stages} stages / one process", statistics.median(ratios), "", 0.8, at_least=True, note=f"least {min(ratios):.3g}"
            ),
            Figure("a hop there and back", statistics.median(hops_ms), "ms", 0.3, note=f"p99 {hops_ms[len(hops_ms) * 99 // 100]:.3g}"),
        ],
        as_json=options.json,
    )


def _generate(model: LoadedModel, num_tokens: int) -> tuple[float, dict[str, list[int]]]:
    """Return the seconds in which all sequences decode, without their prompts, and their tokens."""
    assert model.step_model is not None
    tokens: dict[str, list[int]] = {}

    def hear(message: FromWorker) -> None:
        for event in message.events if isinstance(message, Tokens) else ():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)

    engine = OverlappedEngine(model.step_model, hear)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    for i in range(NUM_SEQS):
        engine.submit(Submit(f"r{i}", (5 + i, 6, 7), params))
    while len(tokens) < NUM_SEQS:
        engine.step()
    began_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    took_s = time.perf_counter() - began_s
    engine.close()
    return took_s, tokens


def hops() -> list[float]:
    """Return the seconds that each of NUM_HOPS hops took."""
    listener = socket.create_server(("127.0.0.1", 0))
    peer = multiprocessing.get_context("spawn").Process(target=_echo, args=(listener.getsockname()[1],), daemon=True)
    peer.start()
    connection, _ = listener.accept()
    link = Link(connection, "the echo")
    arrays = [np.arange(NUM_SEQS, dtype=np.int32) for _ in range(5)] + [np.zeros((NUM_SEQS, 64), np.int32)]
    took_s: list[float] = []
    for _ in range(NUM_HOPS):
        began_s = time.perf_counter()
        link.send(Run(), arrays)
        _, (stream,) = link.receive()
        took_s.append(time.perf_counter() - began_s)
        assert stream.shape == (NUM_SEQS, WIDTH)
    link.shut()
    link.close()
    listener.close()
    peer.join()
    return took_s


def _echo(port: int) -> None:
    link = Link(socket.create_connection(("127.0.0.1", port)), "the worker")
    stream = np.zeros((NUM_SEQS, WIDTH), np.float32)
    try:
        while True:
            link.receive()
            link.send(Stream(), [stream])
    except StageLost:
        link.close()
