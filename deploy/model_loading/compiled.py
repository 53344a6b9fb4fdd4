"""Compile the program of a model for the machine that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.numeric_class import numeric_class
from compiler.signature import key_of
from deploy.model_loading.known import carried
from deploy.model_loading.program import Program, compile_model
from deploy.model_loading.row_bits import trusted
from deploy.model_loading.servable import Servable


@dataclass(frozen=True, kw_only=True, eq=False)
class Compiled(Servable):
    """The state of a load once its program is compiled."""

    program: Program
    device_note: str  # why the program is for another target than the load names; "" if it is not
    numeric_class: str  # name of the class of targets on which the program computes the same bits (compiler/numeric_class.py)
    identity: str  # digest of the whole model's program: equal on all machines, also if the model is computed in stages


def compile_program(known: Servable) -> Compiled:
    """Compile the program of this process, or find it in the cache. If a GPU fails the check of `row_bits.py`, compile for an older
    generation of GPUs; `device_note` then says why."""
    cache = known.cache
    checked = [trusted(known.target, number, cache, known.load.source) for number in known.numbers]
    chosen = next((found for found in checked if found.note), checked[0])
    program = compile_model(known.part or known.module, None if cache is None else cache.executables, chosen.target, known.progress)
    before, found = carried(known, Servable, target=chosen.target), numeric_class(known.module, chosen.target)
    identity = program.identity if known.part is None else key_of(known.module, chosen.target.key).program
    return Compiled(**before, program=program, device_note=chosen.note, numeric_class=found, identity=identity)
