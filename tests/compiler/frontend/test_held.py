"""Programs multiply by matrices that are stored as integers and whose columns are sorted by quantisation group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import Options, compile_module, plan
from compiler.frontend.layers.nn import AS_STORED, Net
from compiler.frontend.quantized.held import Form, form_of_blocks, halves
from compiler.interpret.graph import Interpreter
from compiler.ir.blocks import BLOCKS
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, Var
from compiler.ir.graph.values import MakeTuple
from compiler.ir.module import IRModule
from compiler.ir.numbers import FLOATS_OF_CODES, SPLIT, SPLIT_STEP, TABLES, Kind
from compiler.ir.types import TensorType, tensor
from compiler.machine.target import get, host
from compiler.ops.tables import INTERPRET
from runtime.session import Session

ROWS, INPUTS, OUTPUTS, EXPERTS = 5, 32, 6, 3
FORM = Form(8, 8, DType.F32, ordered=True)
CHOSEN = np.array([2, 0, 0, 1, 2], np.int32)


def parts(name: str, random: np.random.Generator, *matrices: int) -> tuple[dict[str, Any], Any]:
    """Return the stored parts (integers, scales, ...) of matrices whose columns are in a random order, and the values of the matrices with
    columns in the order of the inputs."""
    q = random.integers(-127, 128, (*matrices, OUTPUTS, INPUTS)).astype(np.int8)
    scale = random.random((*matrices, OUTPUTS, INPUTS // FORM.group), np.float32)
    order = random.permuted(np.broadcast_to(np.arange(INPUTS, dtype=np.int32), (*matrices, INPUTS)), axis=-1)
    values = INTERPRET["dequantize"](q, scale, bits=8, group=FORM.group, shifted=False, dtype="f32", kind="int")
    values = np.take_along_axis(values, np.argsort(order, -1)[..., None, :], -1)
    return {f"{name}.weight.q": q, f"{name}.weight.scale": scale, f"{name}.weight.order": order}, values


def one(net: Net, x: Var) -> Var:
    return net.linear(x, "a", INPUTS, OUTPUTS)


def two(net: Net, x: Var) -> Var:
    return net.linear(x, ["a", "b"], INPUTS, (OUTPUTS, OUTPUTS))


def of_experts(net: Net, x: Var) -> Var:
    return net.expert_linear(x, "a", Constant(CHOSEN), EXPERTS, INPUTS, OUTPUTS)


def matrix(net: Net, x: Var) -> Var:
    return net.weight("a.weight", OUTPUTS, INPUTS)


def table(net: Net, x: Var) -> Var:
    return net.embedding("a", Constant(CHOSEN), OUTPUTS, INPUTS)


def expected(build: object, x: Any, a: Any, b: Any) -> Iterator[Any]:
    if build is of_experts:
        yield np.stack([a[e] @ row for e, row in zip(CHOSEN, x, strict=True)])
    elif build is matrix:
        yield a
    else:
        yield x @ a.T
        if build is two:
            yield x @ b.T


@pytest.mark.parametrize("build", [one, two, of_experts, matrix])
def test_inputs_are_reordered_as_the_columns_are(build: Callable[[Net, Var], Var]) -> None:
    random = np.random.default_rng(0)
    matrices = (EXPERTS,) if build is of_experts else ()
    (held, a), (others, b) = parts("a", random, *matrices), parts("b", random)
    arrays = {**held, **others}
    net = Net({n: DType.from_numpy(v.dtype) for n, v in arrays.items()}, AS_STORED, forms={"a.weight": FORM, "b.weight": FORM})
    rows = Var("rows", tensor((ROWS, INPUTS), DType.F32))
    with net.function("f", [rows]):
        net.builder.returns(build(net, rows))
    x = random.standard_normal((ROWS, INPUTS), np.float32)
    found = Interpreter(net.builder.finish()).call("f", x, *(arrays[name] for name in net.weights))
    np.testing.assert_allclose(found, np.concatenate(list(expected(build, x, a, b)), -1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("build", [one, two, of_experts, matrix, table])
def test_numbers_that_are_split_are_added(build: Callable[[Net, Var], Var], kind: Kind) -> None:
    """A matrix whose codes stand for the sum of two numbers is multiplied, stacked, chosen and looked up as that sum."""
    random, form = np.random.default_rng(0), Form(4, 16, DType.F32, kind=kind)
    arrays, values = dict[str, Any](), dict[str, Any]()
    for name in "ab":
        shape = (*((EXPERTS,) if build is of_experts and name == "a" else ()), OUTPUTS, INPUTS)
        codes, absmax = random.integers(0, 16, shape).astype(np.uint8), random.random((*shape[:-1], INPUTS // 16), np.float32)
        step = np.float32(SPLIT_STEP / SPLIT[kind].steps)
        arrays |= {f"{name}.weight.{kind}": halves(codes), f"{name}.weight.scale": absmax * step}
        values[name] = FLOATS_OF_CODES[kind][codes] * np.repeat(absmax, 16, -1)
    net = Net({n: DType.from_numpy(v.dtype) for n, v in arrays.items()}, AS_STORED, forms=dict.fromkeys(("a.weight", "b.weight"), form))
    rows = Var("rows", tensor((ROWS, INPUTS), DType.F32))
    with net.function("f", [rows]):
        net.builder.returns(build(net, rows))
    x, module = random.standard_normal((ROWS, INPUTS), np.float32), net.builder.finish()
    wanted = [values["a"][CHOSEN]] if build is table else list(expected(build, x, values["a"], values["b"]))
    found = Interpreter(module).call("f", x, *(arrays[name] for name in net.weights))
    np.testing.assert_allclose(found, np.concatenate(wanted, -1), rtol=0, atol=1e-3)
    products = plan(module, Options(get("x86-64-v3"))).module.graph("f").weights
    if build is one:
        assert [w.type.dtype for w in products if isinstance(w.type, TensorType)].count(DType.U8) == 1, "both products read the same codes"


@pytest.mark.parametrize("format", [format for format, blocks in BLOCKS.items() if blocks.has_units])
def test_scales_in_units_are_stacked_with_their_units(format: str) -> None:
    """Two matrices whose scales are stored in units (GGUF) are stacked together with their units. The stacked product also compiles for
    machines that do not convert f16, such as WebAssembly."""
    form, random = replace(form_of_blocks(BLOCKS[format]), blocks=""), np.random.default_rng(0)
    net = Net({}, AS_STORED, forms={"a.weight": form, "b.weight": form})
    infos = {f"{name}.weight.{part}": info for name in "ab" for part, info in form.infos((OUTPUTS, 512)).items()}
    net.dtypes = {name: DType.from_numpy(info.dtype) for name, info in infos.items()}
    rows = Var("rows", tensor((ROWS, 512), DType.F32))
    with net.function("f", [rows]):
        net.builder.returns(net.linear(rows, ["a", "b"], 512, (OUTPUTS, OUTPUTS)))
    arrays = {name: random.integers(0, 15, info.shape).astype(info.dtype) for name, info in infos.items()}
    x, module = random.standard_normal((ROWS, 512), np.float32), net.builder.finish()
    found = Interpreter(module).call("f", x, *(arrays[name] for name in net.weights))
    values = []
    for name in "ab":
        part = {part: arrays[f"{name}.weight.{part}"] for part in form.parts}
        q = part[form.numbers[0]]
        numbers = np.stack([q & 15, q >> 4], -1).reshape(OUTPUTS, -1) if form.bits == 4 else q
        numbers = TABLES[form.kind].astype(np.float32)[numbers] if form.kind in TABLES else numbers
        levels = (part[level] * np.repeat(part[f"{level}_unit"], form.per_unit, -1) for level in form.numbers[1:])
        factor, *shift = (np.repeat(level, form.group, -1) for level in levels)
        middle = 8 if form.bits == 4 and form.kind is Kind.INT and not shift else 0
        values.append((numbers - np.float32(middle)) * factor - (shift[0] if shift else 0))
    np.testing.assert_allclose(found, x @ np.concatenate(values).T, rtol=1e-4, atol=0.1)
    compile_module(module, Options(get("wasm-simd128")))


TABLE_ROWS, TABLE_LENGTH = 64, 512


@pytest.mark.parametrize("target", ["x86-64-v3", "avx512-vnni-bf16", "amx", "aarch64-dotprod", "wasm-simd128"])
def test_a_tied_table_is_stored_once(target: str) -> None:
    """The look-up reads the panels of the head's product: the step has the numbers of the table, and its scales, a single time."""
    for format in ("q4_1", "q4_0", "q6_k", "q8_0"):
        form = form_of_blocks(BLOCKS[format])
        step = plan(tied(form), Options(get(target))).module.graph("f")
        types = [w.type for w in step.weights if isinstance(w.type, TensorType)]
        held = sum(prod(d.const for d in t.shape or ()) * t.dtype.num_bytes for t in types if t.dtype is not None)
        infos = form.unpacked_infos((TABLE_ROWS, TABLE_LENGTH)).values()  # numbers of 6 bits are in bytes
        assert 0 < held <= sum(info.num_bytes for info in infos), format


@pytest.mark.parametrize("format", ["q4_1", "q6_k", "q8_0"])
def test_a_tied_table_gives_the_rows_and_the_products_of_its_values(format: str) -> None:
    blocks = BLOCKS[format]
    form, random = form_of_blocks(blocks), np.random.default_rng(0)
    table = random.integers(0, 60, (TABLE_ROWS, TABLE_LENGTH // blocks.num_values * blocks.num_bytes)).astype(np.uint8)
    ids, module = np.array([0, 63, 5, 5, 17], np.int32), tied(form)
    session = Session(executable := compile_module(module, Options(host())))
    bind_values(session, executable, "f", {f"e.weight.{format}": table})
    rows, logits = session.call("f", ids)
    session.close()
    expected, products = Interpreter(module).call("f", ids, table)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(logits, products, rtol=0, atol=0.02 * np.abs(products).max())


def tied(form: Form) -> IRModule:
    """Return the program of a model without layers whose head is its table of embeddings."""
    net = Net({f"e.weight.{form.blocks}": DType.U8}, AS_STORED, forms={"e.weight": form})
    ids = Var("ids", tensor((ROWS,), DType.I32))
    with net.function("f", [ids]):
        x = net.embedding("e", ids, TABLE_ROWS, TABLE_LENGTH)
        net.builder.returns(net.builder.emit(MakeTuple((x, net.head(x, "e", TABLE_LENGTH, TABLE_ROWS)))))
    return net.builder.finish()
