"""Build the programs of steps whose machine code the tools read: models of all kinds, with the weights of all formats.

A program has two layers. That of a hybrid has two layers with a state, and then two with attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compiler.driver import Options, build, plan, signatures_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import StepBounds, build_step
from compiler.frontend.layers.nn import AS_STORED, WeightFormat
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import NO_FORMS, Form, forms_of
from compiler.frontend.weights import TensorInfo
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from compiler.ir.numbers import Kind
from compiler.machine.target import Target, get
from deploy.bench.synthetic import FP8, dtypes_of, fp8_model, shapes_of
from runtime.executable import Executable

MXFP4 = "mxfp4"  # experts as in a checkpoint of gpt-oss
MXFP4_FORM = Form(4, 32, DType.BF16, kind=Kind.E2M1)


def step_of(config: ModelConfig, form: str, target: str, bounds: StepBounds) -> IRModule:
    """Return the program of a step. `form` is how weights are held: a format that loads know, `fp8` or `mxfp4`."""
    config = in_few_layers(config)
    held, forms, dtypes = AS_STORED, NO_FORMS, dtypes_of(config)
    if form == FP8:
        tensors = fp8_model(config).tensors
        forms, dtypes = forms_of(tensors), _dtypes(tensors)
    elif form == MXFP4:
        shapes = {name: shape for name, shape in shapes_of(config).items() if ".experts." in name and name.endswith(".weight")}
        forms = dict.fromkeys(shapes, MXFP4_FORM)
        parts = {f"{name}.{part}": info for name, shape in shapes.items() for part, info in MXFP4_FORM.infos(shape).items()}
        dtypes = {name: dtype for name, dtype in dtypes.items() if name not in shapes} | _dtypes(parts)
    else:
        held = WeightFormat.parse(form)
    return build_step(config, dtypes, bounds, DType.BF16, held, forms=forms, numerics=Numerics.on(get(target)))


def in_few_layers(config: ModelConfig) -> ModelConfig:
    """Return the configuration with two layers of each kind."""
    if config.recurrence is None:
        return replace(config, num_layers=2)
    return replace(config, num_layers=4, recurrence=replace(config.recurrence, layers=frozenset([0, 1])))


def compiled(module: IRModule, target: Target) -> tuple[IRModule, Executable]:
    """Return a program after all passes, and compiled for a GPU. Preparations of weights are left out: they run on the CPU."""
    options = Options(target)
    planned = plan(module, options)
    return planned.module, build(planned.module, options, signatures_of(module, planned))


def _dtypes(tensors: Mapping[str, TensorInfo]) -> dict[str, DType]:
    return {name: DType.from_numpy(info.dtype) for name, info in tensors.items()}
