"""llama.cpp through its C functions. The model is a file, and each sequence has a part of the cache. The tokens before a step are computed
once, for one sequence, and copied to all other sequences."""

from __future__ import annotations

import re
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.bench.gguf_file import write_gguf
from tests.lab.peer import PEERS, Run, Subject

MOST_TOGETHER = 2048  # maximum number of tokens per call


def open_model(subject: Subject) -> LlamaCpp:
    lib = import_module("llama_cpp")
    import_module("llama_cpp._logger").set_verbose(False)
    lib.llama_backend_init()
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, subject.config, subject.weights, PEERS["llama-cpp-python"].formats[subject.held])
        params = lib.llama_model_default_params()
        params.use_mmap = False  # the file is deleted when this function returns
        model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model is not None, "llama.cpp does not load the file"
    return LlamaCpp(lib, model, subject)


class LlamaCpp:
    def __init__(self, lib: Any, model: Any, subject: Subject) -> None:
        self._lib, self._model, self._subject = lib, model, subject
        self._context: Any = None

    def step(self, tokens: int, sequences: int, context: int) -> Run:
        new = tokens // sequences
        self._reserve(sequences, context)
        memory = self._lib.llama_get_memory(self._context)
        for begin in range(0, context - new, MOST_TOGETHER):
            self._decode(np.zeros((1, min(MOST_TOGETHER, context - new - begin)), np.int32), begin)
        for sequence in range(1, sequences if context > new else 1):
            self._lib.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        ids = (np.arange(tokens, dtype=np.int32) % self._subject.config.vocab_size).reshape(sequences, new)

        def run() -> NDArray[Any]:
            for sequence in range(sequences):
                self._lib.llama_memory_seq_rm(memory, sequence, context - new, -1)
            self._decode(ids, context - new)
            logits = [self._lib.llama_get_logits_ith(self._context, (s + 1) * new - 1) for s in range(sequences)]
            return np.stack([np.ctypeslib.as_array(row, (self._subject.config.vocab_size,)) for row in logits])

        return run

    def compute_buffer_bytes(self, context: int, most_tokens: int) -> float:
        """Return the bytes of the buffers for intermediate values of one sequence, which llama.cpp states only in its log."""
        lines: list[str] = []
        log = self._lib.llama_log_callback(lambda _level, text, _data: lines.append(text.decode(errors="replace")))
        self._lib.llama_log_set(log, None)
        try:
            self._reserve(1, context, most_tokens)
        finally:
            self._lib.llama_log_set(import_module("llama_cpp._logger").llama_log_callback, None)
        return (1 << 20) * sum(map(float, re.findall(r"compute buffer size *= *([0-9.]+) MiB", "".join(lines))))

    def close(self) -> None:
        self._release()
        self._lib.llama_model_free(self._model)

    def _reserve(self, sequences: int, context: int, most_tokens: int = 512) -> None:
        self._release()
        params = self._lib.llama_context_default_params()
        params.n_ctx = sequences * max(context, 256)  # llama.cpp divides it equally among the sequences
        params.n_batch, params.n_ubatch, params.n_seq_max, params.kv_unified = MOST_TOGETHER, most_tokens, sequences, False
        params.n_threads = params.n_threads_batch = self._subject.threads
        self._context = self._lib.llama_init_from_model(self._model, params)
        assert self._context is not None, f"llama.cpp has no memory for {sequences} sequences of {context} tokens"

    def _release(self) -> None:
        if self._context is not None:
            self._lib.llama_free(self._context)
            self._context = None

    def _decode(self, ids: NDArray[np.int32], begin: int) -> None:
        """Decode the token ids [sequences, new]. Store the logits after the last token of each sequence."""
        batch = self._lib.llama_batch_init(ids.size, 0, 1)
        batch.n_tokens = ids.size
        for at, ((sequence, number), token) in enumerate(np.ndenumerate(ids)):
            batch.token[at], batch.pos[at] = int(token), begin + number
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = number == ids.shape[1] - 1
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        assert status == 0, f"llama_decode returns {status}"
