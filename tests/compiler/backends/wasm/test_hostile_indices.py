"""In WebAssembly, too, an index outside its range does what the operator declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.op import OPS
from compiler.machine.target import get
from compiler.ops.tables import OPERANDS
from runtime.flat_program import flat_program
from tests.compiler.ops.conftest import close, operand, program
from tests.compiler.ops.hostile.cases import CASES, Case
from tests.node import run_node

ROOT = Path(__file__).parents[4]
DRAWS = 8
BY_STEP = ("paged_attention", "kv_append", "state_write", "token_logprobs", "sample")  # operators of exports, with hand-written loops
RUN = """
import { readFileSync, writeFileSync } from 'node:fs';
const [, runtime, folder] = process.argv;
const { Program, BYTES, sizeOf } = await import(runtime);
const read = (name) => readFileSync(`${folder}/${name}`);
const { description, draws } = JSON.parse(read('draws.json'));
const space = draws[0].reduce((total, { dtype, shape }) => total + sizeOf(dtype, shape) + 64, 0);
const program = await Program.load(description, new WebAssembly.Module(read('m.wasm')), space);
program.weights.set(read('weights'));
const inputs = draws[0].map(({ dtype, shape }) => program.tensor(dtype, shape)), given = read('inputs');
let at = 0;
const found = draws.map(() => {
  for (const input of inputs) {
    const bytes = sizeOf(input.dtype, input.shape);
    program.view(input, Uint8Array).set(given.subarray(at, at + bytes));
    at += bytes;
  }
  return program.call('main', inputs).map((output) => Buffer.from(program.view(output, Uint8Array)));
});
writeFileSync(`${folder}/outputs`, Buffer.concat(found.flat()));
"""


OF_STEP = {name: case for name, case in CASES.items() if case.op in BY_STEP}


@pytest.mark.parametrize("case", OF_STEP.values(), ids=OF_STEP)
def test_hostile_indices_do_in_webassembly_what_the_interpreter_says(case: Case, tmp_path: Path) -> None:
    atoms = [operand(value, None, {}, name) for name, value in zip(OPERANDS[case.op], case.values, strict=False)]
    module = program(OPS[case.op], atoms, case.attrs)
    executable = compile_module(module, Options(get("wasm-simd128")))
    draws = [_arrays(case, draw) for draw in range(DRAWS)]
    flat = flat_program(executable, "main")
    described = [[{"dtype": DType.from_numpy(a.dtype).value, "shape": a.shape} for a in arrays] for arrays in draws]
    (tmp_path / "draws.json").write_text(json.dumps({"description": msgspec.to_builtins(flat), "draws": described}))
    (tmp_path / "m.wasm").write_bytes(executable.object_code)
    weights = bytearray(flat.weights_bytes)
    for stored, constant in zip(flat.weights, executable.constants, strict=True):
        weights[stored.offset : stored.offset + stored.num_bytes] = np.ascontiguousarray(constant).tobytes()
    (tmp_path / "weights").write_bytes(weights)
    (tmp_path / "inputs").write_bytes(b"".join(np.ascontiguousarray(a).tobytes() for arrays in draws for a in arrays))
    run_node(RUN, ROOT / "runtime" / "web" / "program.mjs", tmp_path)
    outputs, at = (tmp_path / "outputs").read_bytes(), 0
    for arrays in draws:
        expected = Interpreter(module).call("main", *arrays)
        for array in expected if isinstance(expected, tuple) else (expected,):
            found = np.frombuffer(outputs, array.dtype, array.size, at).reshape(array.shape)
            at += found.nbytes
            close(found, array, rounds=case.rounds)
    assert at == len(outputs)


def _arrays(case: Case, draw: int) -> list[Any]:
    """Return the operands of a draw. The layer stays as it is, because it is a constant of the program."""
    return [value for value in case.hostile(draw) if isinstance(value, np.ndarray)]
