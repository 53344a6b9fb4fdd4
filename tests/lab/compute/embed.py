"""`python -m tests.lab embed`: the size of an exported C library, static and shared, and the memory that a sequence needs in the library.
With `--peer`, this memory is compared with llama.cpp's compute buffer."""

from __future__ import annotations

import argparse
import re
import tempfile
from contextlib import closing
from importlib import import_module
from pathlib import Path

from compiler.frontend.config import ModelConfig
from deploy.bench.checkpoint import write_checkpoint
from deploy.bench.measure import Figure, report
from deploy.bench.synthetic import RandomWeights, shapes_of, synthetic_config
from deploy.cli.sources import load_of
from deploy.export.c import c_target, export_c
from deploy.model_loading.known import begin
from deploy.model_loading.modes import MAX_STEP_TOKENS
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from tests.lab.peer import FOLDER, PEERS, Subject, check

CONTEXT = 2048
FORMAT = "int4-32"
PEER = "llama-cpp-python"
MB = 1e6


def measure(config: ModelConfig, target: str, folder: Path, *, peer: bool = False) -> list[Figure]:
    checkpoint, output = folder / "checkpoint", folder / "library"
    checkpoint.mkdir()
    output.mkdir()
    write_checkpoint(config, checkpoint)
    model = advance(begin(load_of(str(checkpoint), quantize=FORMAT, max_context=CONTEXT, max_batch=1, kv_dtype="bf16")), Servable)
    shared = export_c(model, "synthetic", c_target(target), output, shared=True)
    header = (output / "model.h").read_text()
    archive_bytes, shared_bytes = (shared.with_suffix(kind).stat().st_size + len(header) for kind in (".a", ".so"))
    # bytes of keys and values, which have 16 bits each
    keys_and_values = 4 * config.num_layers * config.num_kv_heads * config.head_dim * CONTEXT
    planned = _stated(header, "SEQUENCE_BYTES") - keys_and_values
    found = [
        Figure("archive and header", archive_bytes / MB, "MB", 1.0, note=target),
        Figure("shared library and header", shared_bytes / MB, "MB", 1.0, note=target),
        Figure("weights", _stated(header, "WEIGHTS_BYTES") / MB, "MB", note=FORMAT),
        Figure("a sequence beside its keys and values", planned / MB, "MB"),
        Figure("stack", _stated(header, "STACK_BYTES") / MB, "MB"),
    ]
    if peer:
        theirs = compute_buffer_bytes(config)
        note = f"{planned / MB:.1f} of {theirs / MB:.1f} MB; context {CONTEXT}, {MAX_STEP_TOKENS} tokens per step"
        found.append(Figure("a sequence beside its keys and values over llama.cpp's compute buffer", planned / theirs, "x", 1.0, note=note))
    return found


def compute_buffer_bytes(config: ModelConfig) -> float:
    subject = Subject(config, RandomWeights(shapes_of(config)), FORMAT, 1)
    with closing(import_module(f"{FOLDER}.{PEERS[PEER].file}").open_model(subject)) as model:
        return model.compute_buffer_bytes(CONTEXT, MAX_STEP_TOKENS)


def _stated(header: str, name: str) -> int:
    found = re.search(rf"#define RS_{name} (\d+)", header)
    assert found is not None, name
    return int(found[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", default="0.5b", help="shape of the model")
    parser.add_argument("--layers", type=int, help="number of layers; that of the shape by default")
    parser.add_argument("--target", default="aarch64-linux", help="machine of the library")
    parser.add_argument("--peer", choices=(PEER,), help="another engine, where installed, whose memory is compared")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.peer:
        check(options.peer, FORMAT)
    config = synthetic_config(options.synthetic, layers=options.layers)
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        report(measure(config, options.target, Path(folder), peer=bool(options.peer)), as_json=options.json)


if __name__ == "__main__":
    main()
