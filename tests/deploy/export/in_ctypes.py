"""in_ctypes.py COUNT IDS LIBRARY...: load the shared libraries into this process and decode greedily with all of them in turns. Write the
logits of each step of the first library, then of the second one, and so on; write the tokens to stderr."""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import sys
from pathlib import Path

count, prompt = int(sys.argv[1]), json.loads(sys.argv[2])
blocks = dict[int, mmap.mmap]()


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
def allocate(_context: int, num_bytes: int, _alignment: int) -> int:
    block = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    blocks[address] = block
    return address


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def release(_context: int, memory: int) -> None:
    del blocks[memory]


class Model:
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name in ("open", "new", "step"):
            getattr(library, f"rs_{name}").restype = ctypes.c_void_p
        found = re.search(r"RS_VOCAB_SIZE (\d+)", (path.parent / "model.h").read_text())
        assert found is not None
        weights = (path.parent / "weights.bin").read_bytes()
        self.weights = mmap.mmap(-1, len(weights))
        self.weights[:] = weights
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.weights))
        self.library, self.vocab_size = library, int(found[1])
        self.model = ctypes.c_void_p(library.rs_open(ctypes.c_void_p(begin), ctypes.c_size_t(len(weights)), allocate, release, None))
        self.sequence = ctypes.c_void_p(library.rs_new(self.model, 1))
        self.logits, self.found, self.tokens = b"", list[int](), prompt

    def step(self) -> None:
        tokens = (ctypes.c_int32 * len(self.tokens))(*self.tokens)
        logits = self.library.rs_step(self.sequence, tokens, ctypes.c_size_t(len(tokens)))
        self.logits += ctypes.string_at(logits, 4 * self.vocab_size)
        greedy = (ctypes.c_float * 6)(0, 1, 0, 0, 0, 0)
        self.tokens = [self.library.rs_sample(self.sequence, greedy)]
        self.found += self.tokens

    def close(self) -> None:
        self.library.rs_free(self.sequence)
        self.library.rs_close(self.model)


models = [Model(Path(path)) for path in sys.argv[3:]]
for _ in range(count):
    for model in models:
        model.step()
for model in models:
    sys.stdout.buffer.write(model.logits)
    print(*model.found, file=sys.stderr)
    model.close()
assert not blocks, "all memory is released"
