"""What can go wrong below the compiler.

RuntimeFault
  DamagedFile            a stored file does not hold what was written
  IncompatibleExecutable written by another version, or for another machine
  UnresolvedSymbol       object code without a definition that is needed
  InvalidProgram         instructions that no compiler of ours emits
  UnknownName            no such function, parameter, routine
  ArgumentMismatch       a value is not what a specification says
    BoundExceeded        a dimension is outside its declared range
  OutOfMemory            a request beyond the limit, refused before anything was touched
  NoDevice               no GPU can be used: none is there, or what drives it is not installed
  DeviceFault            a GPU failed; what ran on it is lost, and its context with it
  TooDeep                functions that call each other without end
  InvalidFlag            a developer switch that does not parse
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class RuntimeFault(Exception):
    """Base of the errors of this package."""


class DamagedFile(RuntimeFault):
    def __init__(self, path: Path, section: str, problem: str) -> None:
        super().__init__(f"{path}: section {section!r} is damaged: {problem}")
        self.path, self.section, self.problem = path, section, problem


class IncompatibleExecutable(RuntimeFault):
    pass


class DamagedCode(RuntimeFault):
    pass


class UnresolvedSymbol(RuntimeFault):
    pass


class InvalidProgram(RuntimeFault):
    pass


class UnknownName(RuntimeFault):
    def __init__(self, noun: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {noun} {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        self.name = name


class ArgumentMismatch(RuntimeFault):
    pass


class BoundExceeded(ArgumentMismatch):
    pass


class OutOfMemory(RuntimeFault):
    """`limit` is that of the account, None where the system itself refused; `free` is None where it did not say how much there is."""

    def __init__(self, part: str, *, required: int, free: int | None = None, limit: int | None = None) -> None:
        refusal = "the system has no more" if free is None else f"{free:,} are free"
        refusal += "" if limit is None else f" of the limit of {limit:,}"
        super().__init__(f"{part} needs {required:,} bytes, {refusal}; raise the limit or declare smaller bounds")
        self.part, self.required, self.free, self.limit = part, required, free, limit


class NoDevice(RuntimeFault):
    pass


class DeviceFault(RuntimeFault):
    pass


class TooDeep(RuntimeFault):
    pass


class InvalidFlag(RuntimeFault):
    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r}: expected {expected}; correct or unset the variable")
        self.name = name
