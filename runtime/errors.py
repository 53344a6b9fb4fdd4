"""Errors of the runtime.

RuntimeFault
  DamagedFile            the content of a stored file is not what was written
  UnsafeCache            another user could write to the cache, and so run code in this process, or could read its key
  IncompatibleExecutable an executable was written by another version, or for another machine
  DamagedCode            object code or PTX is damaged, or was not written by our compiler
  UnresolvedSymbol       object code needs a symbol that nothing defines
  InvalidProgram         the instructions are not ones that our compiler emits
  UnknownName            no function, builtin, routine, parameter or variable has this name
  ArgumentMismatch       a value does not match its specification, or is missing
    BoundExceeded        a value is outside its declared range, or a derived size does not fit 64 bits or divides by zero
  OutOfMemory            a request for memory exceeds the limit, or the memory of the system or the GPU; nothing is allocated
  NoDevice               the GPUs that a program needs, their driver or pycuda are missing, or these GPUs cannot work together
  DeviceFault            a device failed; after a failure of a GPU, its context and all work on it are lost
  TooDeep                calls of functions are nested too deeply
  InvalidFlag            the value of a developer switch does not parse
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class RuntimeFault(Exception):
    """Base of the errors of this package."""


class DamagedFile(RuntimeFault):
    """The content of a stored file is not what was written."""

    def __init__(self, path: Path, section: str, problem: str) -> None:
        super().__init__(f"{path}: section {section!r} is damaged: {problem}")
        self.path, self.section, self.problem = path, section, problem


class UnsafeCache(RuntimeFault):
    """The cache cannot be trusted: another user could write to it, and so run code in this process, or could read its key. It is not
    trusted either if its folder cannot be read, or if its key has a wrong length."""


class IncompatibleExecutable(RuntimeFault):
    """An executable was written by another version, or for another machine."""


class DamagedCode(RuntimeFault):
    """Object code or PTX is damaged, or was not written by our compiler."""


class UnresolvedSymbol(RuntimeFault):
    """Object code needs a symbol that nothing defines."""


class InvalidProgram(RuntimeFault):
    """The instructions are not ones that our compiler emits."""


class UnknownName(RuntimeFault):
    """No function, builtin, routine, parameter or variable has this name."""

    def __init__(self, noun: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {noun} {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        self.name = name


class ArgumentMismatch(RuntimeFault):
    """A value does not match its specification, or a value is missing."""


class BoundExceeded(ArgumentMismatch):
    """A value is outside its declared range, or a size that is derived from the values does not fit 64 bits or divides by zero."""


class OutOfMemory(RuntimeFault):
    """The runtime refused a request for memory. `limit` is the limit of the memory account, or None if the system or the GPU refused;
    `free` is None if the amount of free memory is unknown."""

    def __init__(self, part: str, *, required: int, free: int | None = None, limit: int | None = None) -> None:
        refusal = "the system has no more" if free is None else f"{free:,} are free"
        refusal += "" if limit is None else f" of the limit of {limit:,}"
        super().__init__(f"{part} needs {required:,} bytes, {refusal}; raise the limit or declare smaller bounds")
        self.part, self.required, self.free, self.limit = part, required, free, limit


class NoDevice(RuntimeFault):
    """The GPUs that a program needs, their driver or pycuda are missing, or these GPUs cannot work together."""


class DeviceFault(RuntimeFault):
    """A device failed, or the system does not allow an operation that the device needs. After a failure of a GPU, its context and all work
    on it are lost."""


class TooDeep(RuntimeFault):
    """Calls of functions are nested too deeply."""


class InvalidFlag(RuntimeFault):
    """The value of a developer switch does not parse."""

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}; correct or unset the variable")
        self.name = name
