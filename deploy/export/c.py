"""`relaxserve export MODEL --target riscv64-linux`: write a folder from which C programs are built.

libMODEL.a     kernels and the functions of model.h; it needs no other library, not even libc or libm
libMODEL.so    the same as a shared library, if the option --shared is set
model.h        the functions that a program calls; all names begin with the prefix, so that several libraries fit into one program
weights.bin    the weights, which a program passes to rs_open, and their fingerprint, by which rs_open recognises the weights of its model
pieces.bin     the bytes of each token's text
example.c      an example program; its first line states the command that builds it
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Final

from compiler.c_library.archive import Member, archive
from compiler.c_library.layout import SAMPLE, Decoder, layout_of
from compiler.c_library.library import functions, library_object
from compiler.c_library.shared import shared_library
from compiler.driver import Options, compile_module
from compiler.frontend.sampler import SAMPLE_ENTRY
from compiler.frontend.weights import WeightSource
from compiler.machine.target import LINUX, NAMED, Target, TargetError
from deploy.export.model import cache_shapes, pieces, require_generator
from deploy.export.weights import write_block
from deploy.model_loading.known import Progress, silent
from deploy.model_loading.servable import Servable
from runtime.cache_groups import PAGE_SIZE
from runtime.executable import Executable
from runtime.flat_program import FlatProgram, flat_program
from server.interfaces import LoadError
from server.messages import ErrorCode

# Further names of targets for C libraries -> the names of these targets in NAMED.
ALIASES: Final = {"aarch64-linux": "aarch64-neon", "riscv64-linux": "riscv64", "riscv64-v-linux": "riscv64-v", "x86-64-linux": "x86-64-v3"}
PREFIX: Final = "rs"  # default prefix of C names; model.h and example.c of this package are written with it
QUESTION: Final = "What is the capital of France?"  # what the example program asks
_ARCHITECTURES: Final = ("x86_64", "aarch64", "riscv64")


def c_targets() -> list[str]:
    """Return the names of all targets for C libraries."""
    return [*ALIASES, *(t.name for t in NAMED.values() if t.arch in _ARCHITECTURES)]


def c_prefix(text: str) -> str:
    """Return a prefix for C names if it is valid, else raise TargetError. Names of functions begin with the prefix, names of macros with
    the prefix in capitals."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", text):
        raise TargetError(f"prefix is {text!r}; expected a small letter, followed by at most 30 small letters, digits and _")
    return text


def c_target(name: str) -> Target:
    """Return the target with this name. Raise TargetError if there is none for C libraries."""
    found = NAMED.get(ALIASES.get(name, name))
    if found is None or found.arch not in _ARCHITECTURES:
        raise TargetError(f"target is {name!r}; expected web or one of {', '.join(c_targets())}")
    return found


def build_command(library: str) -> str:
    """Return the command that builds the example. If the library is a shared one, the program looks for it in the program's own folder."""
    search = "-Wl,-rpath,'$ORIGIN' " if library.endswith(".so") else ""
    return f"cc -pthread example.c {library} {search}-o example"


def export_c(
    model: Servable,
    name: str,
    target: Target,
    folder: Path,
    progress: Progress = silent,
    *,
    prefix: str = PREFIX,
    shared: bool = False,
) -> Path:
    """Compile the model into an archive and, if `shared` is set, into a shared library; write the libraries and the other files of the
    export to `folder`. Return the path of the library that the example uses: the shared one if there is one. Raise LoadError if the model
    cannot be exported."""
    mode = require_generator(model, name)
    if any(group.keeps_states for group in mode.groups):
        raise LoadError(
            ErrorCode.LOAD_REFUSED,
            f"{name} keeps a state per sequence; C libraries support only models with a KV cache: use --target web, or `relaxserve serve`",
        )
    options = Options(target, progress=lambda fraction: progress("compile", fraction), symbols=f"{prefix}.")
    executable = compile_module(model.module, options)
    flat = flat_program(executable, mode.entry, [SAMPLE_ENTRY])
    assert SAMPLE == SAMPLE_ENTRY
    config = model.files.config
    shapes = cache_shapes(mode)
    progress("pack", 0.0)
    fingerprint = write_weights(folder / "weights.bin", flat, executable, mode.weights)
    decoder = Decoder(flat, mode.entry, config.vocab_size, mode.bounds.max_tokens, mode.max_context, PAGE_SIZE, shapes, fingerprint, prefix)
    symbols = dict.fromkeys(
        symbol
        for function in flat.functions.values()
        for symbol in (*(s for r in function.records for s in (r.body, r.grid)), *([] if function.derive is None else [function.derive]))
    )
    path = folder / f"lib{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.a"
    members = {
        "kernels.o": Member(executable.object_code, list(symbols)),
        "library.o": Member(library_object(decoder, target), functions(decoder)),
    }
    path.write_bytes(archive(members))
    if shared:
        path = path.with_suffix(".so")
        path.write_bytes(shared_library([m.content for m in members.values()], target.arch, path.name, functions(decoder)))
    texts = pieces(model.tokenizer, config.vocab_size)
    (folder / "pieces.bin").write_bytes(texts)
    known = {
        "NAME": name,
        "TARGET": target.name + ("" if target.system == LINUX else f", {target.system}"),
        "BUILD": build_command(path.name),
        "VOCAB_SIZE": config.vocab_size,
        "MAX_CONTEXT": mode.max_context,
        "WEIGHTS_BYTES": decoder.weights_bytes,
        "FINGERPRINT": f"0x{fingerprint:016x}",
        "PIECES_BYTES": len(texts),
        "SEQUENCE_BYTES": layout_of(decoder).num_bytes,
        "STACK_BYTES": flat.stack_bytes + (64 << 10),
        "EOS": ", ".join(map(str, model.tokenizer.eos_ids)) or "-1",
        "PROMPT": ", ".join(map(str, _prompt(model))),
    }
    for file in ("model.h", "example.c"):
        text = (files("deploy.export") / file).read_text()
        text = re.sub(r"\b(rs|RS)_", lambda found: (prefix if found[1] == PREFIX else prefix.upper()) + "_", text)
        (folder / file).write_text(re.sub(r"@(\w+)@", lambda found: str(known[found[1]]), text))
    return path


def write_weights(path: Path, flat: FlatProgram, executable: Executable, source: WeightSource) -> int:
    """Write the weights and, after them, their fingerprint of 64 bits. Return the fingerprint."""
    digest = write_block(path, flat, executable, source)
    with path.open("ab") as file:
        file.write(digest)
    return int.from_bytes(digest, "little")


def _prompt(model: Servable) -> list[int]:
    """Return the prompt of the example: the question, as a user's message if the model has a chat template."""
    template = model.tokenizer.chat_template
    if template is None:
        return model.tokenizer.encode(QUESTION, add_special_tokens=True)
    return model.tokenizer.encode(template.render([{"role": "user", "content": QUESTION}]), add_special_tokens=False)
