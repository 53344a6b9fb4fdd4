"""Serve a model of half a billion parameters on a card: `relaxserve bench serve` with 1, 8 and 32 clients."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy.bench.checkpoint import write_checkpoint
from deploy.bench.serving import serve
from deploy.bench.synthetic import llama_config

SMALL = replace(llama_config(64, 1, 2, 1, 32, 128, 2048), max_context=64)  # with the vocabulary of the tokenizer that is written
ALWAYS = ("--device", "cuda", "--quantize", "bf16", "--json")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.gpu_day.served", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model and one client, for a model of a card in software")
    if not parser.parse_args(argv).small:
        serve.main([*ALWAYS, "--model", "synthetic-0.5b", "--clients", "1,8,32"])
        return
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        write_checkpoint(SMALL, Path(folder))
        serve.main([*ALWAYS, "--model", folder, "--clients", "1", "--length", "4"])


if __name__ == "__main__":
    main()
