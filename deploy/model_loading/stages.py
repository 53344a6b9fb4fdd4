"""The stages of a load in order. Each is a function that takes the state of a load (`known.py`) and returns it with further fields. A
command runs the stages that it needs:

compile            to Compiled
inspect            to Compiled; then plans the memory itself, and opens the device only to read its limits
export             to Servable; then compiles the program itself, once for each machine
bench quality      to Planned; then binds the weights itself, without storing them, and runs `serve`
inspect --quality  to Served, for each format of weights that fits into memory
generate, serve    to Described
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from deploy.model_loading.compiled import Compiled, compile_program
from deploy.model_loading.costs import Timed, measure_steps
from deploy.model_loading.description import Described, describe
from deploy.model_loading.files import Formed, Located, Opened, find_source, open_source
from deploy.model_loading.known import Asked, refusals
from deploy.model_loading.plan import Planned, plan_memory
from deploy.model_loading.servable import Servable, choose_program
from deploy.model_loading.serving import Served, serve
from deploy.model_loading.weights import Bound, bind
from deploy.quality.label import Labelled, measure_label
from deploy.quantizing.kept import form_weights

T = TypeVar("T", bound=Asked)

STAGES: Mapping[type[Asked], Callable[[Any], Asked]] = {
    Located: find_source,
    Opened: open_source,
    Formed: form_weights,
    Servable: choose_program,
    Compiled: compile_program,
    Labelled: measure_label,
    Planned: plan_memory,
    Bound: bind,
    Served: serve,
    Timed: measure_steps,
    Described: describe,
}


@refusals()
def advance(known: Asked, to: type[T]) -> T:
    """Run the stages that are left until a value of class `to` is known. Every expected failure is a LoadError whose message contains a
    remedy."""
    for after, stage in STAGES.items():
        if isinstance(known, to):
            break
        if not isinstance(known, after):
            known = stage(known)
    assert isinstance(known, to), f"no stage returns {to.__name__}"
    return known
