"""LLVM IR that the tiles of a GPU share: a thread's place in its block of several warps, addresses, and tensor core instructions."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.llvm.ssa import Code

WARPS, LANES = 4, 32
EIGHT = 8  # number of columns of the right operand of `mma.sync`
SHARED_BYTES = 48 << 10  # bytes of shared memory that a block may use by default; more must be requested from the driver
GLOBAL, SHARED = "ptr addrspace(1)", "ptr addrspace(3)"
_FOUR_FLOATS = "{float, float, float, float}"
_LOW, _HIGH = 0x5410, 0x7632  # selectors of `prmt` for the lower halves, and for the upper halves, of two words


def hidden(code: Code, value: str) -> str:
    """Return a copy of an i64 that LLVM cannot recognise as a copy. So LLVM moves no computation that uses the copy to before this
    place."""
    return code.op(f'call i64 asm sideeffect "mov.b64 $0, $1;", "=l,l"(i64 {value})')


class BlockCode:
    """Emits the code that every thread of a block runs. Across the lanes of a warp, an operand register of `mma.sync` holds 8 rows of 4
    words, and two registers of accumulators hold 8 rows of 4 pairs; this thread has word or pair `quad` of row `group`."""

    def __init__(self, code: Code, *, hides_thread: bool = False) -> None:
        """`hides_thread` says whether LLVM must not recognise the number of the thread, as `BlockProduct` explains."""
        self.code, self._hides_thread = code, hides_thread
        self.find_thread()

    def find_thread(self) -> None:
        """Compute the thread's place in its block."""
        code = self.code
        thread = code.op(f"zext i32 {code.op('call i32 @llvm.nvvm.read.ptx.sreg.tid.x()')} to i64")
        self.thread = hidden(code, thread) if self._hides_thread else thread
        self.lane, self.warp = code.op(f"and i64 {self.thread}, {LANES - 1}"), code.op(f"lshr i64 {self.thread}, 5")
        self.group, self.quad = code.op(f"lshr i64 {self.lane}, 2"), code.op(f"and i64 {self.lane}, 3")

    def barrier(self) -> None:
        """Wait until all threads of the block have arrived here."""
        self.code.do("call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)")

    def fence(self) -> None:
        """Order this thread's accesses to shared memory, and the accesses of other threads for which it has waited, before later
        asynchronous accesses, such as those of `wgmma` and of bulk copies."""
        self.assembly("fence.proxy.async.shared::cta;")

    def assembly(self, text: str, operands: Sequence[tuple[str, str]] = ()) -> None:
        """Emit an instruction of PTX. An operand is its constraint, "r" or "l" for a register of 32 or 64 bits, and its value."""
        kinds = {"r": "i32", "l": "i64"}
        constraints = ",".join([*(kind for kind, _ in operands), "~{memory}"])
        given = ", ".join(f"{kinds[kind]} {value}" for kind, value in operands)
        self.code.do(f'call void asm sideeffect "{text}", "{constraints}"({given}) convergent')

    def over_warp(self, which: str, value: str) -> str:
        """Return the sum ("add"), the least ("min") or the largest ("max") of an integer of 32 bits over the lanes of a warp."""
        return self.code.op(f'call i32 asm sideeffect "redux.sync.{which}.s32 $0, $1, -1;", "=r,r"(i32 {value}) convergent')

    # --- asynchronous copies -------------------------------------------------------------------------------------------

    def copy(self, target: str, source: str, num_bytes: int = 16, read: str | None = None) -> None:
        """Emit an asynchronous copy from global to shared memory. A copy of 16 bytes bypasses L1; smaller copies cannot bypass it. `read`
        is the number of bytes that are read, or None for all; zeros are written instead of the others."""
        kind, few = "cg" if num_bytes == 16 else "ca", ("", "") if read is None else (".s", f", i32 {read}")
        name = f"@llvm.nvvm.cp.async.{kind}.shared.global.{num_bytes}{few[0]}"
        self.code.do(f"call void {name}({SHARED} {target}, {GLOBAL} {source}{few[1]})")

    def commit(self) -> None:
        """Make a group of the copies that this thread has begun since its last group."""
        self.code.do("call void @llvm.nvvm.cp.async.commit.group()")

    def await_copies(self, allowed: int) -> None:
        """Wait for this thread's groups of copies, except for the last `allowed` groups."""
        self.code.do(f"call void @llvm.nvvm.cp.async.wait.group(i32 {allowed})")

    def await_phase(self, mbarrier: str, parity: str, scope: str = "") -> None:
        """Wait until an mbarrier has completed the phase with this parity."""
        code = self.code
        again, done = code.fresh("again"), code.fresh("done")
        code.jump(again)
        code.block(again)
        test = f"{{ .reg .pred p; mbarrier.try_wait.parity.{scope}shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }}"
        arrived = code.op(f'call i32 asm sideeffect "{test}", "=r,r,r,~{{memory}}"(i32 {mbarrier}, i32 {parity}) convergent')
        code.branch(code.op(f"icmp eq i32 {arrived}, 0"), again, done)
        code.block(done)

    # --- tensor cores --------------------------------------------------------------------------------------------------

    def mma(self, left: Sequence[str], right: Sequence[str], sums: Sequence[str]) -> list[str]:
        """Return `sums` plus the product of a 16 x 16 and a 16 x 8 matrix of bf16, which a warp computes together. All arguments are
        registers of this lane."""
        given = ", ".join([*(f"i32 {x}" for x in (*left, *right)), *(f"float {x}" for x in sums)])
        made = self.code.op(f"call {_FOUR_FLOATS} @llvm.nvvm.mma.m16n8k16.row.col.bf16({given})")
        return [self.code.op(f"extractvalue {_FOUR_FLOATS} {made}, {i}") for i in range(4)]

    def low_descriptor(self, place: str, layout: int) -> str:
        """Return the lower half of the descriptor of an operand of `wgmma` in shared memory. `layout` is the descriptor without the
        address."""
        return self.code.op(f"or i32 {self.code.op(f'lshr i32 {self.number_of(place)}, 4')}, {layout & 0xFFFFFFFF}")

    def low_halves(self, a: str, b: str) -> str:
        """Return a word with the lower halves of two words; that of `a` becomes the lower half."""
        return self._permuted(a, b, _LOW)

    def high_halves(self, a: str, b: str) -> str:
        """Return a word with the upper halves of two words; that of `a` becomes the lower half."""
        return self._permuted(a, b, _HIGH)

    def _permuted(self, a: str, b: str, selector: int) -> str:
        return self.code.op(f"call i32 @llvm.nvvm.prmt(i32 {a}, i32 {b}, i32 {selector})")

    # --- memory --------------------------------------------------------------------------------------------------------

    def words(self, kind: str, base: str, at: str, count: int) -> list[str]:
        """Load adjacent 32-bit words that begin `at` bytes after `base`."""
        place = self.gep(kind, base, at)
        if count == 1:
            return [self.code.op(f"load i32, {kind} {place}, align 4")]
        read = self.code.op(f"load <{count} x i32>, {kind} {place}, align {4 * count}")
        return [self.code.op(f"extractelement <{count} x i32> {read}, i32 {i}") for i in range(count)]

    def load_floats(self, places: Sequence[str]) -> list[str]:
        """Load accumulators from the stack. LLVM promotes this memory to registers."""
        return [self.code.op(f"load float, ptr {place}, align 4") for place in places]

    def store_floats(self, values: Sequence[str], places: Sequence[str]) -> None:
        for value, place in zip(values, places, strict=True):
            self.code.do(f"store float {value}, ptr {place}, align 4")

    def store_vector(self, values: Sequence[str], base: str, at: str) -> None:
        """Store adjacent floats in shared memory, beginning `at` bytes after `base`."""
        kind, vector = f"<{len(values)} x float>", "poison"
        for i, value in enumerate(values):
            vector = self.code.op(f"insertelement {kind} {vector}, float {value}, i32 {i}")
        self.code.do(f"store {kind} {vector}, {SHARED} {self.gep(SHARED, base, at)}, align {4 * len(values)}")

    def in_shared(self, pointer: str) -> str:
        """Return a generic pointer as one to shared memory."""
        return self.code.op(f"addrspacecast ptr {pointer} to {SHARED}")

    def number_of(self, place: str) -> str:
        """Return an address in shared memory as a number."""
        return self.code.op(f"ptrtoint {SHARED} {place} to i32")

    def in_global(self, pointer: str) -> str:
        """Return a generic pointer as one to global memory."""
        return self.code.op(f"addrspacecast ptr {pointer} to {GLOBAL}")

    def gep(self, kind: str, base: str, at: str, element: str = "i8") -> str:
        """Return the address that is `at` elements after `base`, in the address space of the pointer type `kind`."""
        return base if at == "0" else self.code.op(f"getelementptr {element}, {kind} {base}, i64 {at}")

    # --- arithmetic of addresses ---------------------------------------------------------------------------------------

    def plus(self, a: str, b: str) -> str:
        """Return a sum. Each operand is the name of an i64, or a number as text."""
        if a.isdigit() and b.isdigit():
            return str(int(a) + int(b))
        return a if b == "0" else b if a == "0" else self.code.op(f"add i64 {a}, {b}")

    def times(self, a: str, b: int) -> str:
        """Return a product. `a` is the name of an i64, or a number as text."""
        return str(int(a) * b) if a.isdigit() else self.code.op(f"mul i64 {a}, {b}")

    def divided(self, a: str, b: int) -> str:
        """Return a quotient. `a` is the name of an i64, or a number as text."""
        return str(int(a) // b) if a.isdigit() else self.code.op(f"sdiv i64 {a}, {b}")
