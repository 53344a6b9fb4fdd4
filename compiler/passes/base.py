"""The interface of passes, and the pipeline that runs a list of them.

A pass is a function `IRModule -> IRModule` without side effects (`RecallKernels` also reads files of machine code). It returns its argument
itself when it changes nothing. Its parameters are fields of a frozen dataclass, and its file has the name of the pass. A pass never prints,
times, verifies or dumps; the instruments of the pipeline do that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Protocol

from compiler.ir.errors import CompileError
from compiler.ir.module import IRModule
from compiler.ir.text.printer import print_module
from compiler.ir.verify.module import VerifyError, verify


class Pass(Protocol):
    """Rewrites a program. If nothing changes, the result is the argument itself."""

    def __call__(self, module: IRModule) -> IRModule: ...


def name_of(step: Pass) -> str:
    """Return the name of a pass: `fold_constants` for the class `FoldConstants` and for the function `fold_constants`."""
    name = getattr(step, "__name__", type(step).__name__)
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Instrument(Protocol):
    """Watches a pipeline."""

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        """Observe a pass that has run: its name, the program before it, the program after it, and the time it took."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes that run in order. The methods that take the name of a pass raise CompileError if no pass has this name. If several passes
    have it, `until`, `after` and `inserted` use the first one, and `only` uses the last one."""

    passes: Sequence[Pass]
    instruments: Sequence[Instrument] = ()

    def __call__(self, module: IRModule) -> IRModule:
        for step in self.passes:
            started = time.perf_counter()
            result = step(module)
            elapsed = time.perf_counter() - started
            for instrument in self.instruments:
                instrument.after(name_of(step), module, result, elapsed)
            module = result
        return module

    def until(self, name: str) -> Pipeline:
        """Return a pipeline of the passes up to and including the named pass."""
        names = [name_of(p) for p in self.passes]
        return Pipeline(self.passes[: names.index(self._known(name)) + 1], self.instruments)

    def after(self, name: str) -> Pipeline:
        """Return a pipeline of the passes after the named pass."""
        names = [name_of(p) for p in self.passes]
        return Pipeline(self.passes[names.index(self._known(name)) + 1 :], self.instruments)

    def inserted(self, step: Pass, name: str) -> Pipeline:
        """Return a pipeline that runs `step` before the named pass."""
        names = [name_of(p) for p in self.passes]
        at = names.index(self._known(name))
        return Pipeline([*self.passes[:at], step, *self.passes[at:]], self.instruments)

    def only(self, chosen: Sequence[str]) -> Pipeline:
        """Return a pipeline of the named passes, in the order given."""
        passes = {name_of(p): p for p in self.passes}
        return Pipeline([passes[self._known(name)] for name in chosen], self.instruments)

    def _known(self, name: str) -> str:
        names = [name_of(p) for p in self.passes]
        if name not in names:
            raise CompileError(f"unknown pass {name!r}; known: {', '.join(names)}")
        return name


@dataclass(slots=True)
class Verify:
    """Verify the module after each pass that changed it. The VerifyError for a broken rule of the IR names the pass."""

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        if module is before:
            return
        try:
            verify(module)
        except VerifyError as error:
            raise VerifyError(f"after pass {name}: {error}") from None


@dataclass(slots=True)
class Timing:
    """Add up the seconds of each pass, by its name."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(slots=True)
class Count:
    """Call `tell` after each pass with the number of passes that have run."""

    tell: Callable[[int], None]
    count: int = 0

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        self.count += 1
        self.tell(self.count)


@dataclass(slots=True)
class Dump:
    """Write the program to numbered files in `folder`, at the start and after each pass that changed it."""

    folder: Path
    count: int = 0

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        if self.count == 0:
            self.write("start", before)
        self.count += 1
        if module is not before:
            self.write(name, module)

    def write(self, name: str, module: IRModule) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.count:02d}-{name}.ir").write_text(print_module(module))


@dataclass(frozen=True, slots=True)
class Show:
    """Show the program after each pass that `at` names, by calling `write` with its text."""

    write: Callable[[str], None]
    at: frozenset[str]

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        if name in self.at:
            self.write(f"# after {name}\n{print_module(module)}")


@dataclass(frozen=True, slots=True)
class ShowChanges:
    """Show what each pass changed, by calling `write` with a diff, or with a line that says that the pass changed nothing."""

    write: Callable[[str], None]

    def after(self, name: str, before: IRModule, module: IRModule, seconds: float) -> None:
        if module is before:
            self.write(f"# {name} changed nothing")
            return
        old, new = print_module(before).splitlines(), print_module(module).splitlines()
        self.write("\n".join(unified_diff(old, new, "before", f"after {name}", lineterm="", n=2)))
