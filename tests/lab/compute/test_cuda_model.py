"""The model of a GPU names what limits a step, and reproduces what is known about steps."""

from __future__ import annotations

import json

import pytest

from compiler.ir.text.parser import parse
from deploy.bench.compute.case import Case
from tests.lab.compute import cuda_model
from tests.lab.compute.cuda_model import CARDS, TARGET, Step, as_json, code_of, predicted, square
from tests.lab.planned import Sizes
from tests.lab.sass.model import predict
from tests.lab.sass.step import ProgramCode, StepCode
from tests.lab.sass.tools import ToolMissing

ONE, MANY = Case(1, 1, 1024), Case(64, 64, 1024)


@pytest.fixture(scope="module")
def code() -> StepCode:
    try:
        return code_of("8b-shape", "bf16", (ONE, MANY))
    except ToolMissing as missing:
        pytest.skip(str(missing))


def test_a_step_reads_the_weights_of_all_layers(code: StepCode) -> None:
    read = sum(x.times * x.num_bytes for x in code.launches(ONE))
    assert 14.9e9 < read < 15.3e9, "7.5 billion weights in layers and head, 2 bytes each, and a little more"


def test_no_kernel_is_faster_than_the_card(code: StepCode) -> None:
    for case in (ONE, MANY):
        for card in CARDS:
            assert all(k.share <= 1 for k in predicted(code, "bf16", case, card).kernels)


def test_a_faster_memory_makes_a_step_faster_but_its_share_smaller(code: StepCode) -> None:
    slow, fast = (predicted(code, "bf16", ONE, card) for card in CARDS)
    assert fast.seconds < slow.seconds and fast.share < slow.share


def test_the_goals_of_decoding_are_met_by_the_model(code: StepCode) -> None:
    """Predicted shares of the limit on an H100: a change of a kernel that makes the steps slower fails here."""
    assert predicted(code, "bf16", ONE, CARDS[0]).share > 0.88
    assert predicted(code, "bf16", MANY, CARDS[0]).share > 0.85


def test_a_product_of_4_bits_is_as_fast_as_it_was() -> None:
    """With one row, thin tiles give nearly every multiprocessor a block. With many rows, the tensor cores are the bound."""
    given = "x: bf16[n, 4096], weight q: u8[4096, 2048], weight s: bf16[4096, 32]"
    body = "{ dataflow { w = dequantize(q, s, bits=4, group=128) y = linear(x, w) } return y }"
    try:
        code = ProgramCode(parse(f"func main({given}) -> object where n in 0..2048 {body}"), TARGET)
    except ToolMissing as missing:
        pytest.skip(str(missing))
    (one,), (many,) = (code.launched("main", Sizes({"n": count}, 1, 1)) for count in (1, 2048))
    assert one.blocks == 128 and predict(CARDS[0], one, ONE).share > 0.52
    assert many.blocks == 512 and predict(CARDS[0], many, Case(2048, 1, 2048)).share > 0.75


def test_a_product_of_many_columns_and_several_rows_takes_one_round() -> None:
    """A wide tile of one block: narrow tiles would be 224 blocks, which 132 multiprocessors run in two rounds."""
    given = "x: bf16[n, 2048], " + ", ".join(f"weight q{i}: u8[14336, 1024], weight s{i}: bf16[14336, 16]" for i in range(2))
    body = "v = dequantize(q0, s0, bits=4, group=128) w = dequantize(q1, s1, bits=4, group=128) a = linear(x, v) b = linear(x, w)"
    text = f"func main({given}) -> object where n in 0..2048 {{ dataflow {{ {body} s = silu(a) y = multiply(s, b) }} return y }}"
    try:
        code = ProgramCode(parse(text), TARGET)
    except ToolMissing as missing:
        pytest.skip(str(missing))
    (found,) = code.launched("main", Sizes({"n": 64}, 1, 1))
    assert predict(CARDS[0], found, MANY).share > 0.55


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
    """On an H100. All launches of attention count, also those that find no work."""
    case = Case(2048, 1, 2048)
    try:
        code = ProgramCode(parse(ATTENTION), TARGET)
    except ToolMissing as missing:
        pytest.skip(str(missing))
    kernels = [predict(CARDS[0], x, case) for x in code.launched("main", Sizes({"t": 2048, "s": 1, "p": 128}, 1, 2048))]
    step = Step("bf16", case, CARDS[0], tuple(kernels))
    assert step.attention_operations_per_s > cuda_model.ATTENTION_GOAL
    assert all(k.launched.kernel.usage.spilled_bytes == 0 for k in kernels)


def test_json_has_a_line_for_each_kernel(code: StepCode) -> None:
    step: Step = predicted(code, "bf16", ONE, CARDS[0])
    kept = json.loads(json.dumps(as_json(step)))
    assert sum(k["times"] * k["seconds"] for k in kept["kernels"]) == pytest.approx(kept["seconds"])


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> StepCode:
        raise ToolMissing("ptxas is not installed: pip install nvidia-cuda-nvcc")

    monkeypatch.setattr(cuda_model, "code_of", missing)
    with pytest.raises(SystemExit, match="ptxas is not installed"):
        cuda_model.main(["--format", "bf16"])
