"""The kernels that a step of a model launches: their machine code, how many blocks they have, and the least that they read and compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, StepBounds
from compiler.ir.dims import Dim
from compiler.ir.graph.values import Launch
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Allocate, For, Stmt, Tile
from compiler.ir.loops.visit import statements, walk_stmts
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.block_product import BlockProduct
from compiler.machine.target import get
from compiler.ops.scan import STATE_SCAN
from deploy.bench.compute.case import Case
from runtime.cache_groups import PAGE_SIZE
from runtime.executable import Phase
from tests.lab.planned import Sizes, planned_bytes
from tests.lab.sass.listing import Listing
from tests.lab.sass.programs import compiled, step_of
from tests.lab.sass.tools import Assembled, Usage, assemble


@dataclass(frozen=True, slots=True)
class Kernel:
    """A phase of a compiled function: most functions have one."""

    name: str
    schedule: str  # the name of its schedule
    prim: PrimFunc  # with the body of the phase
    listing: Listing
    usage: Usage
    threads: int
    shared_bytes: int
    tiles: tuple[Tile, ...]  # the tiles of a product, in the order of the code; empty for other kernels

    @property
    def kinds(self) -> set[str]:
        """The kinds of its instructions."""
        return {x.kind for x in self.listing.instructions}


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch in a step of certain sizes."""

    kernel: Kernel
    blocks: int
    num_bytes: int  # bytes that the launch must read
    rows: int  # rows of a product, or of each run of rows that choose the same matrix; 0 for other kernels
    times: int  # how often the step launches it
    before: Launched | None = None  # the launch before it in the step
    runs: int = 1  # of a product
    working: float = 1.0  # the share of its blocks that have work, because they begin a run
    of_block: float = 1.0  # the number of runs of a block


class ProgramCode:
    """A program compiled for a GPU and assembled."""

    def __init__(self, module: IRModule, target: str) -> None:
        self.target = get(target)
        self.module = module
        self.planned, self.executable = compiled(module, self.target)
        self.assembled: Assembled = assemble(self.executable.object_code, target)
        found = [kernel for k in self.executable.meta.kernels for kernel in self._kernels(k.name)]
        self.kernels: Mapping[str, Kernel] = {kernel.name: kernel for kernel in found}

    def launched(self, entry: str, sizes: Sizes) -> list[Launched]:
        """Return the launches of a function in order."""
        read = planned_bytes(self.module, entry, self.target, sizes)
        launches = [b.value for b in self.planned.graph(entry).body.bindings if isinstance(b.value, Launch)]
        found: list[Launched] = []
        for launch, (name, num_bytes) in zip(launches, read.items(), strict=True):
            assert name.partition(" ")[2] == launch.func, f"{name} is launched as {launch.func}"
            for kernel in self.kernels.values():
                if kernel.name.partition(".")[0] == launch.func:
                    before = replace(found[-1], before=None) if found else None
                    made = Launched(kernel, _blocks(kernel.prim.body, sizes), num_bytes, 0, 1, before)
                    found.append(_with_rows(made, sizes) if kernel.tiles else made)
        return found

    def _kernels(self, name: str) -> Iterator[Kernel]:
        (compiled,) = (k for k in self.executable.meta.kernels if k.name == name)
        prim = self.planned.prim(name)
        for number, (stmt, phase) in enumerate(zip(statements(prim.body), compiled.phases, strict=True)):
            suffix = f".{number + 1}" if len(compiled.phases) > 1 else ""
            yield self._kernel(f"{name}{suffix}", replace(prim, body=stmt), phase)

    def _kernel(self, name: str, prim: PrimFunc, phase: Phase) -> Kernel:
        tiles = tuple(s for s in walk_stmts(prim.body) if isinstance(s, Tile) and isinstance(s.op, BlockProduct))
        usage = self.assembled.usage[phase.body]
        return Kernel(
            name,
            prim.attrs.get("schedule", ""),
            prim,
            self.assembled.listings[phase.body],
            usage,
            phase.threads,
            max(phase.shared_bytes, usage.shared_bytes),
            tiles,
        )


class StepCode(ProgramCode):
    """The step of a model. Its program has two layers of each kind, which stand for all layers of this kind."""

    def __init__(self, config: ModelConfig, form: str, target: str, bounds: StepBounds) -> None:
        self.num_scans = 0 if config.recurrence is None else len(config.recurrence.layers)
        self.num_attentions = config.num_layers - self.num_scans
        super().__init__(step_of(config, form, target, bounds), target)

    def launches(self, case: Case) -> list[Launched]:
        """Return the launches of a step in order."""
        variables = {
            "t": case.tokens,
            "s": case.sequences,
            "r": case.sequences,
            "p": -(-case.context // PAGE_SIZE),
            "m": saved_states(case),
        }
        sizes = Sizes({**variables, "pages": 1 << 20, "pages1": 1 << 20}, case.sequences, case.context)
        launches = self.launched(ENTRY, sizes)
        found = in_layers(launches, lambda x: "attention" in x.kernel.schedule, self.num_attentions)
        return found if self.num_scans == 0 else in_layers(found, lambda x: is_scan(x.kernel), self.num_scans)


def saved_states(case: Case) -> int:
    """Return how many states a step writes: for each sequence, those after the last token of each page, and after its last token."""
    return case.sequences * -(-case.tokens // case.sequences // PAGE_SIZE)


def is_scan(kernel: Kernel) -> bool:
    """Return whether a kernel updates the states of recurrent layers, token by token."""
    return STATE_SCAN.name in kernel.name


class SquareCode(ProgramCode):
    """The product of two square matrices of bf16."""

    def __init__(self, size: int, target: str) -> None:
        self.size = size
        given = f"x: bf16[n, {size}], weight w: bf16[{size}, {size}]"
        super().__init__(parse(f"func main({given}) -> object where n in 0..{size} {{ dataflow {{ y = linear(x, w) }} return y }}"), target)

    def launch(self) -> Launched:
        (launched,) = self.launched("main", Sizes({"n": self.size}, 1, 1))
        return launched


def _with_rows(launched: Launched, sizes: Sizes) -> Launched:
    """Add the number of rows of a product. If rows choose matrices, all matrices are assumed to be chosen by as many rows."""
    tile = launched.kernel.tiles[0]
    assert isinstance(tile.op, BlockProduct)
    if (rows := sizes.value(tile.dims[2])) is not None:
        return replace(launched, rows=rows)
    every = sizes.value(launched.kernel.prim.outputs[0].shape[0])
    assert every is not None, f"the number of rows of {launched.kernel.name} depends on data"
    matrices = min(every, tile.operands[2].buffer.shape[0].const)
    of_matrix = -(-every // max(1, matrices))
    most = max(each.op.rows for each in launched.kernel.tiles if isinstance(each.op, BlockProduct))  # rows of a run
    runs = matrices * -(-of_matrix // most)
    groups = max(1, launched.blocks // -(-tile.operands[2].buffer.shape[-3].const * tile.op.panel_columns // tile.op.columns))
    return replace(launched, rows=-(-every // max(1, runs)), runs=runs, working=min(1.0, runs / groups), of_block=max(1.0, runs / groups))


def _blocks(body: Stmt, sizes: Sizes) -> int:
    (stmt,) = statements(body)
    while isinstance(stmt, Allocate):
        stmt = stmt.body
    assert isinstance(stmt, For), "a scheduled kernel is a loop over blocks"
    extent: Dim = stmt.extent
    count = sizes.value(extent)
    assert count is not None, f"the number of blocks, {extent}, depends on data"
    return count


def in_layers(launches: Sequence[Launched], marks: Callable[[Launched], bool], num_layers: int) -> list[Launched]:
    """Return the launches with the number of times that the whole model launches them. `marks` says which launches mark the layers of a
    kind. The launches after the first mark, up to the second one, make up a layer, which stands for all layers of the kind but one."""
    marked = [i for i, x in enumerate(launches) if marks(x)]
    first, second = (i for i in marked if i - 1 not in marked)  # attention may have two phases
    return [replace(x, times=num_layers - 1) if first < i <= second else x for i, x in enumerate(launches)]
