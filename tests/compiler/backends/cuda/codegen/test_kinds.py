"""Tests read the machine code of steps of all kinds of models, without a card, as test_speed.py does for a dense model: no kernel has a
stack, products copy while they multiply, and the loops that read most have several loads in flight."""

from __future__ import annotations

import pytest

from deploy.bench.synthetic import FP8, synthetic_config
from tests.compiler.backends.cuda.codegen.test_speed import AWAY, attention, kinds_of_attention
from tests.lab.sass.facts import facts_of
from tests.lab.sass.kept_steps import kept_step
from tests.lab.sass.model import loops_of_tiles
from tests.lab.sass.programs import MXFP4
from tests.lab.sass.step import Kernel, ProgramCode, StepCode
from tests.lab.sass.tools import SERIALISED, ToolMissing

pytestmark = pytest.mark.xdist_group("machine code")

# Kinds of models with the format of their weights. `make test` has one of each kind of kernel; the other models have similar kernels.
MODELS = [("8b-shape", FP8), ("gpt-oss-shape", MXFP4), ("0.6b-hybrid", "bf16")]
OTHERS = [
    *(("16b-latent", "bf16"), ("0.6b-mamba", "bf16"), ("4b-gemma-shape", "bf16")),
    *((shape, form) for shape in ("30b-a3b", "8b-shape") for form in ("bf16", "int4-128")),
]
OLDER = ["sm_80", "sm_89", "sm_100a"]


def stacks(code: ProgramCode) -> dict[str, int]:
    """Return the bytes of the stack of each kernel that has one. Loads and stores in local memory say the same."""
    for kernel in code.kernels.values():
        assert (kernel.usage.stack_bytes > 0) == (kernel.listing.num_local > 0), kernel.name
    return {k.name: k.usage.stack_bytes for k in code.kernels.values() if k.usage.stack_bytes}


def check_stacks(shape: str, form: str, target: str) -> None:
    code = kept_step(shape, form, target)
    assert stacks(code) == {}
    assert not SERIALISED.search(code.assembled.said), "the assembler serialised operations that should overlap"


@pytest.mark.parametrize(("shape", "form"), MODELS)
def test_no_kernel_has_a_stack(shape: str, form: str) -> None:
    check_stacks(shape, form, "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "form", "target"),
    [*((*model, "sm_90a") for model in OTHERS), *((*model, target) for model in MODELS + OTHERS for target in OLDER)],
)
def test_no_kernel_of_other_models_or_for_older_cards_has_a_stack(shape: str, form: str, target: str) -> None:
    check_stacks(shape, form, target)


@kinds_of_attention
def test_attention_has_no_stack(kind: str) -> None:
    try:
        assert stacks(attention(kind)) == {}
    except ToolMissing as missing:
        pytest.skip(str(missing))


def by_wgmma(code: StepCode) -> list[Kernel]:
    """Return the products by `wgmma` whose depth needs a loop."""
    return [kernel for kernel in code.kernels.values() if kernel.tiles and kernel.listing.loops_with("HGMMA")]


@pytest.mark.parametrize(("shape", "form"), MODELS)
def test_products_copy_at_least_one_stage_while_they_multiply_another(shape: str, form: str) -> None:
    """The loops along k load nothing but scales, which are used only after other weights have been converted."""
    kernels = by_wgmma(kept_step(shape, form))
    assert kernels
    for kernel in kernels:
        for loops in loops_of_tiles(kernel):
            multiplies, copies = (facts_of(kernel.listing, loop) for loop in (loops.consumer, loops.producer))
            assert loops.wgmma.ahead >= 1 and copies.copies and not copies.barriers, kernel.name
            assert multiplies.load_use is None or multiplies.load_use >= AWAY, f"{kernel.name}, {loops.wgmma.rows} rows"


@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_experts_of_mxfp4_are_multiplied_on_tensor_cores(target: str) -> None:
    """Groups of 32 weights share a scale, so the product is one by mma.sync. It copies at least one stage while it multiplies another, and
    begins to load the scales of a group long before their use."""
    kernels = [k for k in kept_step("gpt-oss-shape", MXFP4, target).kernels.values() if "expert_linear" in k.name]
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.tiles and all(tile.op.stages >= 2 for tile in kernel.tiles), kernel.name
        loops = [facts_of(kernel.listing, loop) for loop in kernel.listing.loops_with("HMMA")]
        assert len(loops) == len(kernel.tiles) and all(f.copies >= 2 for f in loops)
        assert all(f.load_use is None or f.load_use >= AWAY for f in loops), f"{kernel.name} waits for scales"


def test_the_router_of_gpt_oss_is_computed_in_tiles() -> None:
    """Its depth, 2880, is a multiple of 64, and not of 128."""
    code = kept_step("gpt-oss-shape", MXFP4)
    experts = synthetic_config("gpt-oss-shape").mixture
    assert experts is not None
    routers = [k for k in code.kernels.values() if "linear" in k.name and k.prim.outputs[0].shape[-1].const == experts.num_experts]
    assert routers and {k.schedule for k in routers} == {"float product"}


@pytest.mark.parametrize(("shape", "form"), MODELS)
def test_all_large_products_have_tiles(shape: str, form: str) -> None:
    """Only products of few columns, such as those of routers and gates, are computed without tensor cores."""
    for kernel in kept_step(shape, form).kernels.values():
        if "linear" in kernel.name and not kernel.tiles:
            assert all(out.shape[-1].const <= 256 for out in kernel.prim.outputs), f"{kernel.name} has no tile"
