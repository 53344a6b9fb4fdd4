"""On a GPU, too, an index outside its range does what the operator declares. The software GPU names each access outside of a block of
memory."""

from __future__ import annotations

import pytest

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.errors import CompileError
from compiler.machine.target import get
from runtime.errors import RuntimeFault
from runtime.executable import OWN
from runtime.session import Session
from tests.compiler.ops.conftest import close
from tests.compiler.ops.hostile.cases import CASES, Case
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]

DRAWS = 2


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hostile_indices_do_on_a_gpu_what_the_interpreter_says(
    case: Case, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = case.module()
    executable = compile_module(module, Options(get("sm_80")))
    num_ranks = max((rank + 1 for kernel in executable.meta.kernels for rank in kernel.ranks if rank != OWN), default=1)
    if num_ranks > 1:
        software_gpu.has_cards(num_ranks, monkeypatch)
    session = Session(executable, num_ranks=num_ranks)
    for draw in range(DRAWS):
        arguments = case.arguments(draw)
        try:
            expected = Interpreter(module).call("main", *arguments)
        except CompileError:
            with pytest.raises(RuntimeFault):
                session.call("main", *arguments)
            continue
        found = session.call("main", *arguments)
        close(found, expected)
    assert software_gpu.library is None or not software_gpu.faults
    session.close()
