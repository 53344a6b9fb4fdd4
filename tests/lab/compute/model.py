"""`python -m tests.lab model`: what `relaxserve bench model` measures, beside other engines and other shapes.

With --peer, another engine runs the same steps with the same weights and the same number of threads. With --beside, the steps of a second
shape run in turns with those of the first, and the command divides the shares of the first by those of the second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from compiler.frontend.config import ModelConfig
from deploy.bench.checkpoint import write_checkpoint
from deploy.bench.compute.case import Case, Work
from deploy.bench.compute.model import Measured, Row, config_of, gauge_of, measure, measured, model_of, options_with_device, show
from deploy.bench.limits import Gauge, Limits
from deploy.bench.synthetic import RandomWeights, check_shape, shapes_of
from runtime.device.registry import CPU
from server.settings import SettingsError
from tests.lab import card_peer
from tests.lab.card_peer import CARD_PEERS
from tests.lab.compute import beside
from tests.lab.peer import PEERS, Subject, at_work, check, version_of

# Largest permitted difference of a peer's logits from ours, relative to the norm of ours. If both round random 4-bit weights in their own
# way, the logits differ by 0.8 after 24 layers; with unrelated weights they differ by 1.4.
MOST_DIFFERENCE = 1.0


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of a peer: the difference of its logits from ours, relative to the norm of ours, and its measured rows."""

    difference: float
    rows: list[Row]
    version: str = ""  # version of the peer's package


def measure_peer(name: str, subject: Subject, works: Mapping[Case, Work], gauge: Gauge, logits: NDArray[Any]) -> Compared:
    """Measure a peer. Shares are relative to the limit times computed from our own bytes and operations. `logits` are ours for the first
    case; raise SettingsError if the peer's logits differ too much."""
    first = next(iter(works))
    with at_work(name, subject) as steps:
        differs = _checked(name, float(np.linalg.norm(steps(*first)() - logits) / np.linalg.norm(logits)))
        return Compared(differs, measure(steps, works, gauge), version_of(name))


@dataclass(frozen=True, slots=True)
class CardSubject:
    """The model and the steps that all peers on a GPU run, and our results."""

    config: ModelConfig
    works: Mapping[Case, Work]
    logits: NDArray[Any]  # ours for the first case
    limits: Limits
    device: str
    python: str  # the interpreter that has the peers


def measure_on_card(names: Sequence[str], subject: CardSubject) -> Generator[tuple[str, Compared | SettingsError]]:
    """Measure peers on a GPU, each in all its kinds, as PyTorch eager and compiled. Yield the name of each kind with its result, or with
    the reason why there is none. Shares are relative to `subject.limits`, which were measured before."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = card_peer.check(name, card_peer.FORMAT, subject.config, subject.python)
        except SettingsError as error:
            yield name, error
    if not versions:
        return
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        write_checkpoint(subject.config, Path(folder))
        for name, version in versions.items():
            for kind in CARD_PEERS[name].kinds:
                try:
                    yield kind, _measure_kind(kind, version, Path(folder), subject)
                except SettingsError as error:
                    yield kind, error


def _measure_kind(kind: str, version: str, folder: Path, subject: CardSubject) -> Compared:
    cases, limits = list(subject.works), subject.limits
    with card_peer.at_work(kind, folder, cases, subject.device, subject.python) as peer:
        differs = _checked(kind, peer.difference(cases[0], subject.logits))
        seconds = {case: peer.seconds(case) for case in cases}
    shares = {case: limits.share(*work, seconds[case]) for case, work in subject.works.items()}
    rows = [Row(str(case), case.tokens / seconds[case], *work, shares[case]) for case, work in subject.works.items()]
    return Compared(differs, rows, version)


def _found(compared: Compared | SettingsError) -> Compared:
    if isinstance(compared, SettingsError):
        raise compared
    return compared


def _checked(name: str, difference: float) -> float:
    if not difference < MOST_DIFFERENCE:
        raise SettingsError(f"the logits of {name} differ from ours by {difference:.0%}: it does not run the same model")
    return difference


def main(argv: list[str] | None = None) -> None:
    parser = options_with_device("python -m tests.lab model", __doc__)
    names = list(dict.fromkeys((*PEERS, *CARD_PEERS)))
    parser.add_argument("--peer", action="append", default=[], choices=names, help="another engine beside it, where installed; repeatable")
    parser.add_argument(
        "--beside", metavar="SHAPE", help="also divide each share by that of another shape, whose steps run in turns with it"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers on a GPU; default: this one")
    options = parser.parse_args(argv)
    shape: str | None = options.beside
    if shape is not None:
        check_shape(shape, "--beside")
    for name in options.peer:
        if options.device == CPU:
            check(name, options.quantize)
        else:
            card_peer.check(name, options.quantize, config_of(options), options.peer_python)
    gauge = gauge_of(options, options.device)
    model = model_of(options, options.device)
    works, found = model.works, measured(model, gauge)
    divided = [] if shape is None else beside.measure(shape, options, model, gauge)
    logits = np.array(model.session.download(model.prepared(*next(iter(works)))()))
    subject = Subject(model.config, RandomWeights(shapes_of(model.config)), options.quantize, model.session.num_threads)
    model.session.close()
    del model  # free our model's memory before peers load their weights
    if options.device == CPU:
        peers = {name: measure_peer(name, subject, works, gauge, logits) for name in options.peer}
    else:
        on_card = CardSubject(subject.config, works, logits, found.limits, options.device, options.peer_python)
        peers = {kind: _found(compared) for kind, compared in measure_on_card(options.peer, on_card)}
    if options.json:
        turns = None if shape is None else {"shape": shape, "rows": [asdict(row) for row in divided]}
        compared = {name: asdict(peer) for name, peer in peers.items()}
        print(json.dumps({**asdict(found), "peers": compared, "beside": turns}, indent=1))
        return
    show(found, f"{options.synthetic} {options.quantize}")
    if peers:
        Console().print(table_of(found, peers))
    if shape is not None:
        Console().print(beside.table_of(f"{options.synthetic} in turns with {shape}", shape, divided))


def table_of(found: Measured, peers: Mapping[str, Compared]) -> Table:
    """Make a table with a column per peer: the peer's tokens per second, and in brackets its share of the limit, which was measured in the
    same seconds."""
    apart = ", ".join(f"{name} differ by {peer.difference:.1%}" for name, peer in peers.items())
    table = Table("", "relaxserve", *peers, title="tokens/s (share of the limit)", caption=f"Logits of {apart}")
    for rows in zip(found.rows, *(peer.rows for peer in peers.values()), strict=True):
        table.add_row(rows[0].name, *(f"{row.tokens_per_s:.1f} ({row.share:.2f})" for row in rows))
    return table


if __name__ == "__main__":
    main()
