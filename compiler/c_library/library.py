"""Write the functions of a C library around its kernels as LLVM IR:

    PREFIX_fingerprint, PREFIX_open, PREFIX_new, PREFIX_step, PREFIX_sample, PREFIX_rewind, PREFIX_help, PREFIX_stop, PREFIX_free,
    PREFIX_close

Records of the flat program become straight-line calls. Integers that never change are part of the code; all other integers are read from
the shape heap. The state is in blocks that the caller's function `allocate` returns: one for a model, and one for each sequence. Threads
that the caller starts may help.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from compiler.c_library.layout import LENGTH, LOGITS, MODEL, SAMPLE, TEAM, WORD, Decoder, Layout, layout_of, literal
from compiler.c_library.team import THREADS, team_text
from compiler.codegen.machine_code import llvm_machine, optimised
from compiler.llvm.ssa import Code, float_literal
from compiler.machine.target import Target
from runtime.flat_program import FlatBase, FlatFunction, Record
from runtime.sampling import NOTHING_LEFT, SHARE_ONE

FUNCTIONS: Final = ("fingerprint", "open", "new", "step", "sample", "rewind", "help", "stop", "free", "close")
WEIGHTS, ALLOCATE, RELEASE, CONTEXT, MODEL_BYTES = 0, 8, 16, 24, 32  # offsets of the fields of a model's block, and its size
ALIGNMENT: Final = 64
TEMPERATURE, TOP_P, TOP_K, SEED = 0, 4, 8, 16  # offsets of the fields of the struct PREFIX_sampling
SHARPEST: Final = 1e30  # largest factor of the logits, for temperatures close to 0
INFINITY: Final = float_literal(float("inf"))


def functions(decoder: Decoder) -> list[str]:
    """Return the names that a library defines for other code."""
    return [f"{decoder.prefix}_{name}" for name in FUNCTIONS]


def library_object(decoder: Decoder, target: Target) -> bytes:
    """Return the object with the functions of this file. It refers to the kernels in another object."""
    with optimised(library_text(decoder, target), target) as module:
        return llvm_machine(target).emit_object(module)


def library_text(decoder: Decoder, target: Target) -> str:
    """Return the LLVM IR of the functions of the library, of the functions that run records, and of team.ll."""
    layout, program = layout_of(decoder), decoder.program
    kernels = dict.fromkeys(r.body for f in program.functions.values() for r in f.records)
    grids = dict.fromkeys(r.grid for f in program.functions.values() for r in f.records)
    derives = [f.derive for f in program.functions.values() if f.derive is not None]
    # Hidden: the library contains its kernels, so its code addresses them directly, without a table of addresses.
    declared = [
        *(f"declare hidden void @{name}(ptr, ptr, i64, i64)" for name in kernels),
        *(f"declare hidden i64 @{name}(ptr)" for name in (*grids, *derives)),
    ]
    functions = [*(_replay(decoder, layout, function) for function in program.functions.values()), _fingerprint(decoder), _open(decoder)]
    functions += [_new(decoder, layout), _step(decoder, layout), _sample(decoder, layout), _rewind(decoder), _help(decoder), _stop(decoder)]
    functions += [_free(decoder), _close(decoder), team_text(target)]
    return "\n".join(declared) + "\n\n" + "\n\n".join(functions) + '\n\nattributes #0 = { nounwind "no-builtins" }\n'


# --- writing LLVM IR -----------------------------------------------------------------------------------------------------


def _function(head: str, code: Code, result: str) -> str:
    """Return the definition of a function with the body `code`, which returns `result`."""
    return f"define {head} #0 {{\nentry:\n{code.text()}\n  ret {result}\n}}"


def _at(code: Code, pointer: str, offset: int | str) -> str:
    """Return the address `offset` bytes after `pointer`."""
    return code.op(f"getelementptr i8, ptr {pointer}, i64 {offset}")


def _item(code: Code, pointer: str, index: str) -> str:
    """Return the address of element `index` in an array of i32."""
    return code.op(f"getelementptr i32, ptr {pointer}, i64 {index}")


def _load(code: Code, kind: str, pointer: str, offset: int) -> str:
    return code.op(f"load {kind}, ptr {_at(code, pointer, offset)}")


def _store(code: Code, kind: str, value: object, pointer: str, offset: int | str) -> None:
    code.do(f"store {kind} {value}, ptr {_at(code, pointer, offset)}")


# --- records of the flat program -----------------------------------------------------------------------------------------


def _replay(decoder: Decoder, layout: Layout, function: FlatFunction) -> str:
    """Emit the function that runs a function of the flat program. It calls `derive`, if there is one, and runs the records if `derive`
    returns 0. It returns what `derive` returns, or 0 without `derive`."""
    code, program = Code(), decoder.program
    buffers, dims = code.alloca(f"[{program.most_buffers} x ptr]"), code.alloca(f"[{program.most_dims} x i64]")
    heap = _at(code, "%sequence", layout.heaps[function.name])
    weights = _load(code, "ptr", code.op(f"load ptr, ptr {_at(code, '%sequence', MODEL)}"), WEIGHTS)
    status = "0" if function.derive is None else code.op(f"call i64 @{function.derive}(ptr {heap})")
    with code.when(code.op(f"icmp eq i64 {status}, 0")):
        for record in function.records:
            _call(code, layout, function, record, (heap, weights, buffers, dims))
    return _function(f"internal i64 @run.{function.name}(ptr %sequence)", code, f"i64 {status}")


def _call(code: Code, layout: Layout, function: FlatFunction, record: Record, places: tuple[str, str, str, str]) -> None:
    """Emit a record: store its arguments in the arrays `buffers` and `dims`, and run its kernel if the grid has iterations."""
    heap, weights, buffers, dims = places

    def word(slot: int) -> str:
        known = literal(function, slot)
        return code.op(f"load i64, ptr {_at(code, heap, WORD * slot)}") if known is None else str(known)

    for i, (base, slot) in enumerate(record.buffers):
        match base:
            case FlatBase.ARENA:
                begin = _at(code, "%sequence", layout.arena + function.arena_begin)
            case FlatBase.WEIGHTS:
                begin = weights
            case _:
                begin = _input(code, layout, function.inputs[base - FlatBase.INPUT].name)
        _store(code, "ptr", _at(code, begin, word(slot)), buffers, 8 * i)
    for i, slot in enumerate(record.dims):
        _store(code, "i64", word(slot), dims, WORD * i)
    iterations = code.op(f"call i64 @{record.grid}(ptr {dims})")
    with code.when(code.op(f"icmp sgt i64 {iterations}, 0")):
        team = _at(code, "%sequence", TEAM)
        code.do(f"call void @run_together(ptr {team}, ptr @{record.body}, ptr {buffers}, ptr {dims}, i64 {iterations})")


def _input(code: Code, layout: Layout, name: str) -> str:
    """Return the address of an input. The last step stored the address of `logits`; all other inputs are in the sequence's block."""
    if name == "logits":
        return _load(code, "ptr", "%sequence", LOGITS)
    return _at(code, "%sequence", layout.inputs[name])


def _define(code: Code, decoder: Decoder, layout: Layout, name: str, values: dict[str, tuple[object, ...]]) -> None:
    """Emit the stores of the inputs' extents to their slots. `values` has the shapes that differ from the largest ones, by the name of the
    input without its number."""
    function = decoder.program.functions[name]
    for definition in function.definitions:
        tensor = function.inputs[definition.input].name
        shape = values.get(tensor.rstrip("0123456789"), decoder.most(tensor))
        _store(code, "i64", shape[definition.axis], "%sequence", layout.heaps[name] + WORD * definition.slot)


# --- functions of the library --------------------------------------------------------------------------------------------


def _fingerprint(decoder: Decoder) -> str:
    """Emit the function that returns the fingerprint of weights, or 0 if the weights have another size than the model's or are null."""
    code = Code()
    fits = code.op(f"icmp eq i64 %weights_bytes, {decoder.weights_bytes}")
    fits = code.op(f"and i1 {fits}, {code.op('icmp ne ptr %weights, null')}")
    place = _at(code, "%weights", decoder.program.weights_bytes)
    found = code.choose(fits, "i64", lambda: code.op(f"load i64, ptr {place}, align 1"), lambda: "0")
    return _function(f"i64 @{decoder.prefix}_fingerprint(ptr %weights, i64 %weights_bytes)", code, f"i64 {found}")


def _open(decoder: Decoder) -> str:
    """Emit the function that makes a model. It returns null if the weights are not the model's weights or not aligned, if `allocate` or
    `release` is null, or if `allocate` returns null."""
    code = Code()
    fingerprint = code.op(f"call i64 @{decoder.prefix}_fingerprint(ptr %weights, i64 %weights_bytes)")
    fits = code.op(f"icmp eq i64 {fingerprint}, {decoder.fingerprint}")
    for pointer in ("%allocate", "%release"):
        fits = code.op(f"and i1 {fits}, {code.op(f'icmp ne ptr {pointer}, null')}")
    address = code.op("ptrtoint ptr %weights to i64")
    aligned = code.op(f"icmp eq i64 {code.op(f'and i64 {address}, {ALIGNMENT - 1}')}, 0")

    def opened() -> str:
        made = code.op(f"call ptr %allocate(ptr %context, i64 {MODEL_BYTES}, i64 {ALIGNMENT})")
        with code.when(code.op(f"icmp ne ptr {made}, null")):
            for offset, value in ((WEIGHTS, "%weights"), (ALLOCATE, "%allocate"), (RELEASE, "%release"), (CONTEXT, "%context")):
                _store(code, "ptr", value, made, offset)
        return made

    model = code.choose(code.op(f"and i1 {fits}, {aligned}"), "ptr", opened, lambda: "null")
    head = f"ptr @{decoder.prefix}_open(ptr %weights, i64 %weights_bytes, ptr %allocate, ptr %release, ptr %context)"
    return _function(head, code, f"ptr {model}")


def _new(decoder: Decoder, layout: Layout) -> str:
    """Emit the function that makes a sequence, or returns null if the model is null or `allocate` returns null. The function clears the
    block, stores the number of threads, which is at least 1, and fills page tables with the pages from 1 on, in order: page 0 is
    padding."""
    code = Code()

    def allocated() -> str:
        allocate, context = _load(code, "ptr", "%model", ALLOCATE), _load(code, "ptr", "%model", CONTEXT)
        return code.op(f"call ptr {allocate}(ptr {context}, i64 {layout.num_bytes}, i64 {ALIGNMENT})")

    made = code.choose(code.op("icmp ne ptr %model, null"), "ptr", allocated, lambda: "null")
    with code.when(code.op(f"icmp ne ptr {made}, null")):
        with code.loop("0", str(layout.num_bytes // WORD), runs=True) as i:
            code.do(f"store i64 0, ptr {code.op(f'getelementptr i64, ptr {made}, i64 {i}')}")
        _store(code, "ptr", "%model", made, MODEL)
        several = code.op("call i32 @llvm.smax.i32(i32 %threads, i32 1)")
        _store(code, "i64", code.op(f"zext i32 {several} to i64"), made, TEAM + THREADS)
        for name, place in layout.inputs.items():
            if name.startswith("page_tables"):
                table = _at(code, made, place)
                with code.loop("0", str(decoder.most_pages), runs=True) as i:
                    page = code.op(f"trunc i64 {code.op(f'add i64 {i}, 1')} to i32")
                    code.do(f"store i32 {page}, ptr {_item(code, table, i)}")
    return _function(f"ptr @{decoder.prefix}_new(ptr %model, i32 %threads)", code, f"ptr {made}")


def _step(decoder: Decoder, layout: Layout) -> str:
    """Emit the function that runs the step over parts of at most `max_tokens` tokens. It returns the logits after the last token. It
    returns null and changes nothing if there are no tokens, if a token is not in the vocabulary, or if the context is too short for the
    tokens."""
    code = Code()
    before = _load(code, "i64", "%sequence", LENGTH)
    some = code.op("icmp ne i64 %count, 0")
    room = code.op(f"sub i64 {decoder.max_context}, {before}")
    fits = code.op(f"and i1 {some}, {code.op(f'icmp ule i64 %count, {room}')}")

    def stepped() -> str:
        parts = code.op(f"udiv i64 {code.op(f'add i64 %count, {decoder.max_tokens - 1}')}, {decoder.max_tokens}")
        with code.loop("0", parts, runs=True) as part:
            _part(code, decoder, layout, part)
        return _load(code, "ptr", "%sequence", LOGITS)

    def known() -> str:
        return code.choose(_known_tokens(code, decoder), "ptr", stepped, lambda: "null")

    logits = code.choose(fits, "ptr", known, lambda: "null")
    return _function(f"ptr @{decoder.prefix}_step(ptr %sequence, ptr %tokens, i64 %count)", code, f"ptr {logits}")


def _known_tokens(code: Code, decoder: Decoder) -> str:
    """Emit a loop that tests whether all tokens are in the vocabulary. Negative tokens, read as unsigned numbers, are too large."""
    largest = code.alloca("i32")
    code.do(f"store i32 0, ptr {largest}")
    with code.loop("0", "%count", runs=True) as i:
        token = code.op(f"load i32, ptr {_item(code, '%tokens', i)}")
        before = code.op(f"load i32, ptr {largest}")
        code.do(f"store i32 {code.op(f'call i32 @llvm.umax.i32(i32 {before}, i32 {token})')}, ptr {largest}")
    return code.op(f"icmp ult i32 {code.op(f'load i32, ptr {largest}')}, {decoder.vocab_size}")


def _part(code: Code, decoder: Decoder, layout: Layout, part: str) -> None:
    """Emit the step over part number `part` of the tokens. Only the last part computes logits. The tokens are appended to the sequence."""
    start = _load(code, "i64", "%sequence", LENGTH)
    begin = code.op(f"mul i64 {part}, {decoder.max_tokens}")
    left = code.op(f"sub i64 %count, {begin}")
    count = code.op(f"call i64 @llvm.umin.i64(i64 {left}, i64 {decoder.max_tokens})")
    is_last = code.op(f"zext i1 {code.op(f'icmp eq i64 {left}, {count}')} to i64")
    with code.loop("0", count, runs=True) as i:
        token = code.op(f"load i32, ptr {_item(code, '%tokens', code.op(f'add i64 {begin}, {i}'))}")
        position = code.op(f"trunc i64 {code.op(f'add i64 {start}, {i}')} to i32")
        slot = code.op(f"add i32 {position}, {decoder.page_size}")
        values = {"tokens": token, "positions": position, "seq_ids": "0", "slots": slot}
        for name, place in layout.inputs.items():
            if (kind := name.rstrip("0123456789")) in values:
                code.do(f"store i32 {values[kind]}, ptr {_item(code, _at(code, '%sequence', place), i)}")
    last = code.op(f"trunc i64 {code.op(f'sub i64 {count}, 1')} to i32")
    _store(code, "i32", last, "%sequence", layout.inputs["logit_rows"])
    end = code.op(f"add i64 {start}, {count}")
    pages = code.op(f"udiv i64 {code.op(f'add i64 {end}, {decoder.page_size - 1}')}, {decoder.page_size}")
    shapes: dict[str, tuple[object, ...]] = dict.fromkeys(("tokens", "positions", "slots", "seq_ids"), (count,))
    shapes |= {"page_tables": (1, pages), "logit_rows": (is_last,), "hidden_rows": (0,)}
    _define(code, decoder, layout, decoder.entry, shapes)
    code.op(f"call i64 @run.{decoder.entry}(ptr %sequence)")
    _store(code, "i64", end, "%sequence", LENGTH)
    function = decoder.program.functions[decoder.entry]
    offset = function.outputs[0].offset
    known = literal(function, offset)
    moved = _load(code, "i64", "%sequence", layout.heaps[function.name] + WORD * offset) if known is None else str(known)
    logits = _at(code, _at(code, "%sequence", layout.arena + function.arena_begin), moved)
    _store(code, "ptr", logits, "%sequence", LOGITS)


def _sample(decoder: Decoder, layout: Layout) -> str:
    """Emit the function that draws a token, or returns NOTHING_LEFT before the first step, which has no logits yet."""
    code = Code()
    logits = _load(code, "ptr", "%sequence", LOGITS)
    token = code.choose(code.op(f"icmp ne ptr {logits}, null"), "i32", lambda: _drawn(code, decoder, layout), lambda: str(NOTHING_LEFT))
    return _function(f"i32 @{decoder.prefix}_sample(ptr %sequence, ptr %sampling)", code, f"i32 {token}")


def _drawn(code: Code, decoder: Decoder, layout: Layout) -> str:
    """Emit the code that writes the settings in the order of runtime/sampling.py, and calls the sampler. Return the operand with the token,
    or with NOT_A_NUMBER or NOTHING_LEFT."""
    one = float_literal(1.0)
    temperature, top_p = _load(code, "float", "%sampling", TEMPERATURE), _load(code, "float", "%sampling", TOP_P)
    warm = code.op(f"fcmp ogt float {temperature}, 0.0")
    inverse = code.op(f"fdiv float {one}, {code.op(f'select i1 {warm}, float {temperature}, float {one}')}")
    mild = code.op(f"fcmp olt float {inverse}, {float_literal(_f32(SHARPEST))}")
    sharp = code.op(f"select i1 {mild}, float {inverse}, float {float_literal(_f32(SHARPEST))}")
    numbers = (code.op(f"select i1 {warm}, float {sharp}, float 0.0"), INFINITY, one, "0.0", "0.0")
    for i, number in enumerate(numbers):
        _store(code, "float", number, "%sequence", layout.inputs["numbers"] + 4 * i)
    scaled = code.op(f"fmul double {code.op(f'fpext float {top_p} to double')}, {float_literal(SHARE_ONE)}")
    share = code.op(f"call i64 @llvm.fptosi.sat.i64.f64(double {code.op(f'fadd double {scaled}, {float_literal(0.5)}')})")
    share = code.op(f"call i64 @llvm.smin.i64(i64 {share}, i64 {SHARE_ONE})")
    top_k = code.op(f"sext i32 {_load(code, 'i32', '%sampling', TOP_K)} to i64")
    seed, length = _load(code, "i64", "%sampling", SEED), _load(code, "i64", "%sequence", LENGTH)
    for i, setting in enumerate((seed, length, 0, top_k, share, SHARE_ONE, -1, -1, 0)):
        _store(code, "i64", setting, "%sequence", layout.inputs["settings"] + WORD * i)
    _define(code, decoder, layout, SAMPLE, {"logits": (1, decoder.vocab_size), "masks": (0, -(-decoder.vocab_size // 32))})
    code.op(f"call i64 @run.{SAMPLE}(ptr %sequence)")
    function = decoder.program.functions[SAMPLE]
    place = literal(function, function.outputs[0].offset)
    assert place is not None, "the sampler's tokens have a fixed place"
    return _load(code, "i32", "%sequence", layout.arena + function.arena_begin + place)


def _rewind(decoder: Decoder) -> str:
    """Emit the function that shortens a sequence to its first `length` tokens. A sequence that is not longer stays as it is."""
    code = Code()
    length = _load(code, "i64", "%sequence", LENGTH)
    _store(code, "i64", code.op(f"call i64 @llvm.umin.i64(i64 {length}, i64 %length)"), "%sequence", LENGTH)
    return _function(f"void @{decoder.prefix}_rewind(ptr %sequence, i64 %length)", code, "void")


def _help(decoder: Decoder) -> str:
    """Emit the function in which a thread of the caller runs parts of kernels, until no kernel has begun for a while, or until `stop` is
    called. It returns 0 after `stop`, otherwise 1."""
    code = Code()
    goes_on = code.op(f"call i32 @help_team(ptr {_at(code, '%sequence', TEAM)})")
    return _function(f"i32 @{decoder.prefix}_help(ptr %sequence)", code, f"i32 {goes_on}")


def _stop(decoder: Decoder) -> str:
    """Emit the function that makes all threads in `help` return 0."""
    code = Code()
    code.do(f"call void @stop_team(ptr {_at(code, '%sequence', TEAM)})")
    return _function(f"void @{decoder.prefix}_stop(ptr %sequence)", code, "void")


def _free(decoder: Decoder) -> str:
    """Emit the function that gives the memory of a sequence to the caller's function `release`. It does nothing for null."""
    code = Code()
    with code.when(code.op("icmp ne ptr %sequence, null")):
        model = _load(code, "ptr", "%sequence", MODEL)
        code.do(f"call void {_load(code, 'ptr', model, RELEASE)}(ptr {_load(code, 'ptr', model, CONTEXT)}, ptr %sequence)")
    return _function(f"void @{decoder.prefix}_free(ptr %sequence)", code, "void")


def _close(decoder: Decoder) -> str:
    """Emit the function that gives the memory of a model to the caller's function `release`. It does nothing for null."""
    code = Code()
    with code.when(code.op("icmp ne ptr %model, null")):
        code.do(f"call void {_load(code, 'ptr', '%model', RELEASE)}(ptr {_load(code, 'ptr', '%model', CONTEXT)}, ptr %model)")
    return _function(f"void @{decoder.prefix}_close(ptr %model)", code, "void")


def _f32(value: float) -> float:
    """Round a literal of type float to f32, as LLVM requires."""
    return float(np.float32(value))
