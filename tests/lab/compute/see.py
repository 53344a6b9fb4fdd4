"""`python -m tests.lab see`: the time to encode an image of 1,024 x 1,024 pixels in the shape of SigLIP so400m, as a share of the peak of
matrix products. Patches have 16 pixels, and all arithmetic counts: that of the layers, of the patches, of the table of positions and of the
connector."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import parse_config
from compiler.frontend.seeing import ENTRY
from compiler.frontend.vision import Vision
from compiler.ir.dtypes import DType
from compiler.ir.types import TensorType
from deploy.bench.limits import Gauge
from deploy.bench.measure import Figure, report
from deploy.model_loading.patches import inputs_of
from runtime.fits import Filled
from runtime.session import Session
from server.messages import Crop
from tests.golden.vision import SUBJECTS

SHAPE = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "patch_size": 16, "num_patches": 256}
EDGE = 1024  # pixels
GOAL = 0.6
SPAN_S, MOST_RUNS = 20.0, 20


def measure(layers: int, held: str, threads: int | None) -> Figure:
    gauge = Gauge(held, threads)
    given = SUBJECTS["lfm2_vl"].config
    config = parse_config({**given, "vision_config": {**given["vision_config"], **SHAPE, "num_hidden_layers": layers}})
    assert config.vision is not None
    vision = replace(config.vision, cutting=replace(config.vision.cutting, fit=Filled(EDGE**2)))
    config = replace(config, vision=vision)
    module = build_step(config, {}, StepBounds(64, 4, 128), DType.F32, WeightFormat.parse(held), entry=BOTH)
    executable = compile_module(module)
    session = Session(executable, device_threads=threads, pinned=True)
    random = np.random.default_rng(0)
    weights = {
        weight.name: random.normal(1.0 if "norm" in weight.name else 0.0, 0.02, [dim.const for dim in weight.type.shape]).astype(np.float32)
        for weight in module.graph(ENTRY).weights
        if isinstance(weight.type, TensorType) and weight.type.shape is not None
    }
    bind_values(session, executable, ENTRY, weights)
    edge = EDGE // vision.crop_size
    crop = Crop.of(random.integers(0, 256, EDGE**2 * 3, dtype=np.uint8).tobytes(), edge, edge)
    args = inputs_of(vision, [crop])
    seconds, limits = gauge.beside(lambda: session.call(ENTRY, *args), seconds=SPAN_S, most=MOST_RUNS)
    work = operations(vision, edge**2, config.hidden_size)
    note = f"{seconds:.2f} s, {work / seconds / 1e9:.0f} of {limits.flops / 1e9:.0f} GFLOP/s, {layers} layers, {held}"
    return Figure("encode an image over the peak of products", work / seconds / limits.flops, "x", GOAL, at_least=True, note=note)


def operations(vision: Vision, squares: int, size: int) -> float:
    """Return the operations of encoding a crop. A multiply-add counts as two."""
    places, own, middle = squares * vision.num_patches, vision.hidden_size, vision.connector_size
    layer = places * (4 * own**2 + 2 * own * vision.intermediate_size) + 2 * places**2 * own
    before = places * own * (3 * vision.patch_size**2 + vision.table_edge**2)
    after = squares * middle * (own * vision.merge**2 + size)
    return 2.0 * (vision.num_layers * layer + before + after)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab see", description=__doc__)
    parser.add_argument("--layers", type=int, default=2, help="of the 27, which are all alike")
    parser.add_argument("--quantize", default="bf16", choices=("bf16", "f32"), help="format of the encoder's weights")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    report([measure(options.layers, options.quantize, options.threads)], as_json=options.json)


if __name__ == "__main__":
    main()
