"""Define the state of a load, which begins as `Asked`. Each stage returns a value of its own class, which inherits the fields of the class
before and adds what the stage found out. So the class of a function's parameter tells which stages must have run before:

Asked       the front's message, the target that it names, the cache  known.py
Located     where the source is on this machine                       files.py
Opened      the opened files                                          files.py
Formed      the files, with quantised weights if the load wants them  files.py, deploy/quantizing/kept.py
Servable    the mode, the program, what the model serves              servable.py
Compiled    the executable                                            compiled.py
Labelled    the quality label, if the load asks for it                deploy/quality/label.py
Planned     the open device, the memory plan                          plan.py
Bound       the file with the packed weights                          weights.py
Served      the model that takes steps                                serving.py
Timed       how long its steps take                                   costs.py
Described   what the front is told about the model                    description.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from compiler.frontend.errors import ModelError
from compiler.machine.target import Target, TargetError, of_gpu, runnable
from deploy.cache import Kept, kept
from runtime.device.cuda.card import capability_of, require_reachable
from runtime.device.registry import CPU, number_of
from runtime.errors import NoDevice, OutOfMemory, UnsafeCache
from server.interfaces import LoadError
from server.messages import ErrorCode, Load, QualityLabel, StageReport
from server.stages.relay import Relay

Progress = Callable[[str, float], None]  # called with the current part of a load and the completed fraction of that part
Measure = Callable[[Load, Progress], QualityLabel | None]  # measures the quality label of a load; returns None if that is impossible


def silent(part: str, fraction: float) -> None:
    """Ignore the progress of a load."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """The state with which a load begins."""

    load: Load
    target: Target
    number: int  # number of the device among the devices of its kind
    cache: Kept | None  # the folder of files that are stored between starts; None: nothing is stored
    measure: Measure | None = None  # measures the quality label; None: this load does not ask for one
    progress: Progress = silent
    relay: Relay | None = None  # the stages of the model before this one; None: this process computes all layers, or an early stage
    reports: tuple[StageReport, ...] = ()  # reports of all stages of the model, if it is computed in stages
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices that compute the model."""
        if self.load.tensor_parallel == 1:
            return (self.load.device,)
        kind = self.load.device.partition(":")[0]
        return tuple(f"{kind}:{number}" for number in self.numbers)

    @property
    def numbers(self) -> range:
        """The numbers of the devices that compute the model, among the devices of their kind."""
        return range(self.number, self.number + self.load.tensor_parallel)


def begin(load: Load, progress: Progress = silent) -> Asked:
    """Begin a load. Raise LoadError if this machine cannot run its target, if `tensor_parallel` does not fit the other settings or the
    GPUs, or if another user can write to the cache."""
    number = number_of(load.device)
    try:
        with refusals():
            require_ranks(load, number)
        target = runnable(load.target) if load.device == CPU else of_gpu(load.target, capability_of(number))
    except (TargetError, NoDevice) as error:
        raise LoadError(ErrorCode.INVALID_VALUE, str(error)) from error
    with refusals():
        return Asked(load=load, target=target, number=number, cache=kept(), progress=progress)


def require_ranks(load: Load, number: int) -> None:
    """Check the settings of a load that divides the model over GPUs from `number` on. Raise LoadError, NoDevice or ModelError if a setting
    does not go with `tensor_parallel`, or if the GPUs do not exist or cannot work together."""
    count = load.tensor_parallel
    if count == 1:
        return
    if load.device == CPU:
        text = f"tensor_parallel is {count} and device is {CPU!r}; expected cuda: set device to cuda, or leave tensor_parallel out"
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    from compiler.frontend.layers.nn import WeightFormat  # only here: other loads do without its imports until they need them

    refused = {
        "stages is set": bool(load.stages) or load.layers is not None,
        "label is set": load.label,
        f"quantize is {load.quantize!r}, which measures the whole model": WeightFormat.parse(load.quantize).budget > 0,
    }
    if reason := next((reason for reason, applies in refused.items() if applies), ""):
        text = f"tensor_parallel is {count} and {reason}: they are not supported together; leave one of them out"
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    require_reachable(range(number, number + count))


def carried(known: Asked, of: type[Asked], **others: Any) -> dict[str, Any]:
    """Return the fields of `known` that class `of` has, updated with `others`: the arguments for a value of `of`, or of a class that
    inherits from it."""
    return {**{each.name: getattr(known, each.name) for each in fields(of)}, **others}


@contextmanager
def refusals() -> Generator[None]:
    """Turn errors of the model and of the machine into a LoadError: a model or a setting that is not supported, files that cannot be read,
    an unsafe cache, too little memory. An OSError that names no file is raised unchanged."""
    try:
        yield
    except (ModelError, UnsafeCache) as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{error.filename} cannot be read: {error.strerror}") from error
    # the plan fitted, but the memory is missing: another process took it, or memory_limit_bytes exceeds the machine's memory
    except OutOfMemory as error:
        text = f"{error}. The memory was free when the load was planned: unload other models, or lower memory_limit_bytes"
        raise LoadError(ErrorCode.INSUFFICIENT_MEMORY, text, error.required, error.free or 0) from error
