"""Test the model that predicts the time of steps on a GPU. Kernels that become slower by the model fail here."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.block_product import BlockProduct
from deploy.bench.compute.case import Case
from tests.lab.compute import cuda_model
from tests.lab.compute.cuda_model import CARDS, TARGET, Step, as_json, code_of, square
from tests.lab.planned import Sizes
from tests.lab.sass.kept_steps import kept_step
from tests.lab.sass.model import CARDS_OF, Card, copies_early, predict
from tests.lab.sass.step import Launched, ProgramCode, StepCode, is_scan
from tests.lab.sass.tools import ToolMissing

pytestmark = pytest.mark.xdist_group("machine code")  # with test_speed.py and test_kinds.py, which read the same steps

ONE, MANY, PREFILL = Case(1, 1, 1024), Case(64, 64, 1024), Case(2048, 1, 2048)


@cache
def predicted(code: StepCode, case: Case, card: Card) -> Step:
    return cuda_model.predicted(code, "bf16", case, card)


@pytest.fixture(scope="module")
def code() -> StepCode:
    return kept_step("8b-shape", "bf16")


def test_a_step_reads_the_weights_of_all_layers(code: StepCode) -> None:
    read = sum(x.times * x.num_bytes for x in code.launches(ONE))
    assert 14.9e9 < read < 15.3e9, "7.5 billion weights in layers and head, 2 bytes each, and a little more"


def test_no_kernel_is_faster_than_the_card(code: StepCode) -> None:
    for case in (ONE, MANY):
        for card in CARDS:
            assert all(k.share <= 1 for k in predicted(code, case, card).kernels)


def test_a_faster_memory_makes_a_step_faster_but_its_share_smaller(code: StepCode) -> None:
    slow, fast = (predicted(code, ONE, card) for card in CARDS)
    assert fast.seconds < slow.seconds and fast.share < slow.share


def test_the_goals_of_decoding_are_met_by_the_model(code: StepCode) -> None:
    """The predicted shares of the limit on an H100 are 0.91 for one sequence and 0.87 for many: a change of a kernel that makes these steps
    slower fails here."""
    assert predicted(code, ONE, CARDS[0]).share > 0.89
    assert predicted(code, MANY, CARDS[0]).share > 0.855


@pytest.fixture(scope="module")
def mixture() -> StepCode:
    try:
        return code_of("30b-a3b", "bf16", (ONE, MANY))
    except ToolMissing as missing:
        pytest.skip(str(missing))


def test_a_mixture_decodes_as_fast_as_it_did(mixture: StepCode) -> None:
    """Predicted shares of the limit on an H100 are 0.59 and 0.90."""
    assert predicted(mixture, ONE, CARDS[0]).share > 0.57
    assert predicted(mixture, MANY, CARDS[0]).share > 0.88


def test_products_of_experts_run_on_tensor_cores(mixture: StepCode) -> None:
    """Of one token, each of 8 rows is a run. Of 64 tokens, each of 128 experts has 4 rows, and a block has as many."""
    products = [x for x in mixture.launches(MANY) if "expert_linear" in x.kernel.name]
    assert products and all("HGMMA" in x.kernel.kinds and x.kernel.usage.spilled_bytes == 0 for x in products)
    assert {(x.rows, x.runs, x.working) for x in products} == {(4, 128, 1.0)}
    assert {(x.rows, x.runs) for x in mixture.launches(ONE) if "expert_linear" in x.kernel.name} == {(1, 8)}


def test_a_product_with_an_unrolled_loop_has_a_time() -> None:
    """The products of single heads are so short that their loops along k are unrolled completely."""
    given = "x: bf16[n, 128], e: i32[n], weight w: bf16[16, 512, 128]"
    text = f"func main({given}) -> object where n in 0..64 {{ dataflow {{ y = expert_linear(x, w, e) }} return y }}"
    found = predict(CARDS[0], launch_of(assembled(text), 16), Case(1, 1, 1024))
    assert 0 < found.share <= 1 and found.launched.runs == 16


def test_a_product_by_mma_has_a_time() -> None:
    """Groups of 32 weights are shorter than a step of `wgmma`, so experts of MXFP4 are multiplied by `mma.sync`."""
    given = "x: bf16[n, 2048], e: i32[n], weight q: u8[16, 256, 1024], weight s: bf16[16, 256, 64]"
    body = 'w = dequantize(q, s, bits=4, group=32, kind="e2m1") y = expert_linear(x, w, e)'
    text = f"func main({given}) -> object where n in 0..64 {{ dataflow {{ {body} }} return y }}"
    found = predict(CARDS[0], launch_of(assembled(text), 16), Case(1, 1, 1024))
    assert {tile.op.name for tile in found.launched.kernel.tiles} == {"mma_product"} and found.launched.runs == 16
    assert 0 < found.share < 1


@pytest.fixture(scope="module")
def by_mma() -> ProgramCode:
    given = "x: bf16[n, 4096], weight w: bf16[14336, 4096]"
    return assembled(f"func main({given}) -> object where n in 0..2048 {{ dataflow {{ y = linear(x, w) }} return y }}", "sm_80")


def test_a_product_on_an_older_card_is_as_fast_as_it_was(by_mma: ProgramCode) -> None:
    """On an A100, one row takes as long as its weights take from memory. With many rows, the warps' instructions are the bound. The model
    predicts 0.82 and 0.62 of the limit."""
    (card,) = CARDS_OF["sm_80"]
    one, many = launch_of(by_mma, 1), launch_of(by_mma, 2048)
    assert 0.8 < predict(card, one, ONE).share < 0.9
    assert 0.6 < predict(card, many, PREFILL).share < 0.7


def test_slower_tensor_cores_and_memory_slow_down_the_products_that_they_bound(by_mma: ProgramCode) -> None:
    (card,) = CARDS_OF["sm_80"]
    one, many = launch_of(by_mma, 1), launch_of(by_mma, 2048)
    slow_products, slow_memory = replace(card, mma_operations=256), replace(card, bytes_per_s=card.bytes_per_s / 8)

    def slower(than: Card, launched: Launched, case: Case) -> float:
        return predict(than, launched, case).seconds / predict(card, launched, case).seconds

    assert slower(slow_products, many, PREFILL) > 4 and slower(slow_products, one, ONE) == 1
    assert slower(slow_memory, one, ONE) > 6 and slower(slow_memory, many, PREFILL) == 1


@pytest.fixture(scope="module")
def hybrid() -> StepCode:
    return kept_step("0.6b-hybrid", "bf16")


def test_a_hybrid_launches_the_kernels_of_all_its_layers(hybrid: StepCode) -> None:
    """Of 24 layers, every eighth has attention, of two phases. The others scan states of 1 MB for each sequence."""
    launches = hybrid.launches(MANY)
    times = {"state_scan": 0, "paged_attention.1": 0, "paged_attention.2": 0}
    for x in launches:
        if x.kernel.name in times:
            times[x.kernel.name] += x.times
    assert times == {"state_scan": 21, "paged_attention.1": 3, "paged_attention.2": 3}
    states = {x.num_bytes for x in launches if is_scan(x.kernel)}
    assert all(64 << 20 <= num_bytes < 70 << 20 for num_bytes in states)
    read = sum(x.times * x.num_bytes for x in hybrid.launches(ONE))
    assert 1.07e9 < read < 1.13e9, "half a billion weights of 2 bytes, and 21 states of 1 MB"


def test_a_hybrid_decodes_as_fast_as_it_did(hybrid: StepCode) -> None:
    """Predicted shares of the limit on an H100 are 0.34 and 0.41. While scans kept states in shared memory, they were 0.09 and 0.10."""
    assert predicted(hybrid, ONE, CARDS[0]).share > 0.32
    assert predicted(hybrid, MANY, CARDS[0]).share > 0.39


def test_no_kernel_of_a_hybrid_is_faster_than_the_card(hybrid: StepCode) -> None:
    for case in (ONE, MANY):
        assert all(0 <= k.share <= 1 for k in predicted(hybrid, case, CARDS[0]).kernels)


def test_a_scan_takes_as_long_as_its_tokens(hybrid: StepCode) -> None:
    """A block scans the tokens of one sequence one after another. Reading the state takes as long for one token as for many."""

    def seconds(case: Case) -> float:
        return next(k.seconds for k in predicted(hybrid, case, CARDS[0]).kernels if is_scan(k.launched.kernel))

    one, two, four = (seconds(Case(count, 1, 1024)) for count in (16, 32, 64))
    assert four - two == pytest.approx(2 * (two - one))
    assert seconds(ONE) < one and seconds(Case(64, 64, 1024)) < four


def test_a_run_has_as_many_rows_as_the_highest_tile() -> None:
    """Of 256 rows, 128 choose each of two matrices: two runs on a card whose tiles have 128 rows."""
    given = "x: bf16[n, 128], e: i32[n], weight w: bf16[2, 512, 128]"
    code = assembled(f"func main({given}) -> object where n in 0..256 {{ dataflow {{ y = expert_linear(x, w, e) }} return y }}")
    launched = launch_of(code, 256)
    assert max(tile.op.rows for tile in launched.kernel.tiles if isinstance(tile.op, BlockProduct)) == 128
    assert (launched.rows, launched.runs) == (128, 2)


def test_a_block_that_runs_one_part_of_a_kernel_takes_the_time_of_this_part() -> None:
    """With few rows, a block of a router's product computes one element; with many, a tile. The model takes one of them."""
    text = "func main(x: f32[n, 2048], w: f32[128, 2048]) -> object where n in 0..2048 { dataflow { y = linear(x, w) } return y }"
    few, many = (predict(CARDS[0], launch_of(assembled(text), count), Case(count, count, 1024)) for count in (1, 64))
    assert 2 * few.warp < many.warp


@pytest.fixture(scope="module")
def int4() -> ProgramCode:
    given = "x: bf16[n, 4096], weight q: u8[4096, 2048], weight s: bf16[4096, 32]"
    body = "{ dataflow { w = dequantize(q, s, bits=4, group=128) y = linear(x, w) } return y }"
    return assembled(f"func main({given}) -> object where n in 0..2048 {body}")


def test_a_product_of_4_bits_is_as_fast_as_it_was(int4: ProgramCode) -> None:
    """With one row, thin tiles give nearly every multiprocessor a block. With many rows, the tensor cores are the bound. The model predicts
    0.57 and 0.86 of the limit on an H100."""
    one, many = launch_of(int4, 1), launch_of(int4, 2048)
    assert one.blocks == 128 and predict(CARDS[0], one, ONE).share > 0.555
    assert many.blocks == 512 and predict(CARDS[0], many, PREFILL).share > 0.845


@pytest.mark.parametrize("case", [ONE, PREFILL], ids=["narrow", "wide"])
def test_an_early_begin_saves_each_wait_once(case: Case, int4: ProgramCode) -> None:
    """A launch that begins while the launch before it still runs saves as many cycles if the bandwidth of memory bounds it as if the work
    of its blocks does."""
    late = launch_of(int4, case.tokens)
    early = replace(late, before=replace(late, blocks=1))  # leaves room for other blocks

    def saved(num_bytes: int) -> float:
        before, after = (predict(CARDS[0], replace(x, num_bytes=num_bytes), case).seconds for x in (late, early))
        return (before - after) * CARDS[0].clock_hz

    assert saved(0) == pytest.approx(saved(1 << 40))


def test_only_narrow_tiles_copy_weights_before_they_wait(int4: ProgramCode) -> None:
    assert [copies_early(launch_of(int4, count)) for count in (1, 64, 2048)] == [True, True, False]


def test_a_product_of_many_columns_and_several_rows_takes_one_round() -> None:
    """The product uses wide tiles, each of which one block computes alone: narrow tiles would need 224 blocks, which 132 multiprocessors
    run in two rounds. The model predicts 0.57 of the limit on an H100."""
    given = "x: bf16[n, 2048], " + ", ".join(f"weight q{i}: u8[14336, 1024], weight s{i}: bf16[14336, 16]" for i in range(2))
    body = "v = dequantize(q0, s0, bits=4, group=128) w = dequantize(q1, s1, bits=4, group=128) a = linear(x, v) b = linear(x, w)"
    text = f"func main({given}) -> object where n in 0..2048 {{ dataflow {{ {body} s = silu(a) y = multiply(s, b) }} return y }}"
    assert predict(CARDS[0], launch_of(assembled(text), 64), MANY).share > 0.55


def test_a_product_of_8_bits_with_many_columns_is_as_fast_as_it_was() -> None:
    """Such a product is the head of a model, whose kernel has at most 64 rows. The wide tile for 9 to 64 rows leaves no room for a second
    block, but narrow tiles would be slower even with one. The model predicts 0.99 of the limit on an H100."""
    given = "x: bf16[n, 4096], weight q: i8[151936, 4096], weight s: f32[151936, 1]"
    code = assembled(f"func main({given}) -> object where n in 0..64 {{ dataflow {{ w = dequantize(q, s) y = linear(x, w) }} return y }}")
    few, many = (predict(CARDS[0], launch_of(code, count), Case(count, count, 1024)).share for count in (16, 64))
    assert few > 0.97 and many > 0.97


def assembled(text: str, target: str = TARGET) -> ProgramCode:
    try:
        return ProgramCode(parse(text), target)
    except ToolMissing as missing:
        pytest.skip(str(missing))


def launch_of(code: ProgramCode, rows: int) -> Launched:
    (found,) = code.launched("main", Sizes({"n": rows}, 1, 1))
    return found


def test_a_product_of_square_matrices_is_near_its_goal() -> None:
    try:
        assert square(CARDS[0]).share > 0.82
    except ToolMissing as missing:
        pytest.skip(str(missing))


ATTENTION = """
func main(q: f32[t, 32, 128], cache: bf16[1, 2, 256, 8, 2048], tables: i32[s, p], ids: i32[t], at: i32[t]) -> object
    where t in 0..2048, s in 0..1, p in 0..129 {
  dataflow {
    out = paged_attention(q, cache, tables, ids, at, 0, scale=0.088)
    rounded = cast(out, dtype="bf16")
  }
  return rounded
}
"""


def test_attention_of_a_prefill_meets_its_goal() -> None:
    """The predicted operations per second on an H100 reach the goal. All launches of attention count, also those that find no work. No
    kernel spills registers."""
    code = assembled(ATTENTION)
    kernels = [predict(CARDS[0], x, PREFILL) for x in code.launched("main", Sizes({"t": 2048, "s": 1, "p": 128}, 1, 2048))]
    step = Step("bf16", PREFILL, CARDS[0], tuple(kernels))
    assert step.attention_operations_per_s > cuda_model.ATTENTION_GOAL
    assert all(k.launched.kernel.usage.spilled_bytes == 0 for k in kernels)


def test_json_has_a_line_for_each_kernel(code: StepCode) -> None:
    step: Step = predicted(code, ONE, CARDS[0])
    kept = json.loads(json.dumps(as_json(step)))
    assert sum(k["times"] * k["seconds"] for k in kept["kernels"]) == pytest.approx(kept["seconds"])


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> StepCode:
        raise ToolMissing("ptxas is not installed: pip install nvidia-cuda-nvcc")

    monkeypatch.setattr(cuda_model, "code_of", missing)
    with pytest.raises(SystemExit, match="ptxas is not installed"):
        cuda_model.main(["--format", "bf16"])
