"""Run the steps of a day with a card by the peers that are installed, PyTorch and vLLM, with the same weights, and print a line of JSON
for each. Their logits are compared with ours."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from deploy.bench.limits import Limits
from server.settings import SettingsError
from tests.lab.card_peer import CARD_PEERS, FORMAT
from tests.lab.compute.model import CardSubject, measure_on_card
from tests.lab.gpu_day.shares import Card, extent, first_of


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.gpu_day.peers", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a model of a card in software")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers; default: this one")
    options = parser.parse_args(argv)
    for row in peers(Card.of(extent(is_small=options.small)), options.peer_python):
        print(json.dumps(row), flush=True)


def peers(card: Card, python: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each step of each peer, or the reason why a peer has none."""
    limits = Limits(card.copies(), card.product()["flops"])
    model = card.model(FORMAT)
    works = {case: model.work(case) for case in card.extent.cases}
    logits = np.array(model.session.download(first_of(model.prepared(*card.extent.cases[0])())))
    model.session.close()
    del model  # free its memory before peers load their weights
    subject = CardSubject(card.extent.config, works, logits, limits, "cuda", python)
    for kind, found in measure_on_card(list(CARD_PEERS), subject):
        if isinstance(found, SettingsError):
            yield {"peer": kind, "left_out": str(found)}
            continue
        for row in found.rows:
            yield {"peer": kind, "version": found.version, "difference": found.difference, **asdict(row)}


if __name__ == "__main__":
    main()
