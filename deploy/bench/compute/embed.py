"""`relaxserve bench embed`: the size of an exported C library, and the memory that a sequence needs in the library."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

from compiler.frontend.config import ModelConfig
from deploy.bench.checkpoint import write_checkpoint
from deploy.bench.measure import Figure, report
from deploy.bench.synthetic import synthetic_config
from deploy.cli.sources import load_of
from deploy.export.c import c_target, export_c
from deploy.model_loading.servable import require_servable, silent

CONTEXT = 2048
MB = 1e6


def measure(config: ModelConfig, target: str, folder: Path) -> list[Figure]:
    checkpoint, output = folder / "checkpoint", folder / "library"
    checkpoint.mkdir()
    output.mkdir()
    write_checkpoint(config, checkpoint)
    library = export_c(
        require_servable(load_of(str(checkpoint), "int4", CONTEXT, 1, None, "bf16"), silent), "synthetic", c_target(target), output
    )
    header = (output / "model.h").read_text()
    size = library.stat().st_size + len(header)
    # bytes of keys and values, which have 16 bits each
    keys_and_values = 4 * config.num_layers * config.num_kv_heads * config.head_dim * CONTEXT
    return [
        Figure("archive and header", size / MB, "MB", 1.0, note=target),
        Figure("weights", _stated(header, "WEIGHTS_BYTES") / MB, "MB", note="int4"),
        Figure("a sequence beside its keys and values", (_stated(header, "SEQUENCE_BYTES") - keys_and_values) / MB, "MB"),
        Figure("stack", _stated(header, "STACK_BYTES") / MB, "MB"),
    ]


def _stated(header: str, name: str) -> int:
    found = re.search(rf"#define RS_{name} (\d+)", header)
    assert found is not None, name
    return int(found[1])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="relaxserve bench embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", default="0.5b", help="shape of the model")
    parser.add_argument("--layers", type=int, help="in the place of the shape's own")
    parser.add_argument("--target", default="aarch64-linux", help="machine of the library")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        report(measure(synthetic_config(options.synthetic, layers=options.layers), options.target, Path(folder)), as_json=options.json)


if __name__ == "__main__":
    main()
