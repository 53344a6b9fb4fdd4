"""Run an exported decoder in wasmtime. Like runtime/web/program.mjs, this module executes the records of the flat program, but it does no
checks."""

from __future__ import annotations

import ctypes
import json
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import wasmtime
from numpy.typing import NDArray

from runtime.cache_groups import PAGE_SIZE
from runtime.executable import DTYPES
from runtime.flat_program import FlatBase, FlatProgram
from runtime.sections import align

PAGE_BYTES = 1 << 16
STACK_BYTES = BEGIN = 1 << 20  # the module's own data and stack are below this address


class Decoder:
    def __init__(self, folder: Path, target: str) -> None:
        described = json.loads((folder / "program.json").read_bytes())
        level = next(level for level in described["levels"] if level["target"] == target)
        self.model: dict[str, Any] = described["model"]
        self.flat = msgspec.convert(level["program"], FlatProgram)
        self.step = self.flat.functions[self.model["entry"]]
        self.length, self._end = 0, BEGIN
        stack = self._take(STACK_BYTES) + STACK_BYTES
        self._buffers, self._dims = self._take(4 * self.flat.most_buffers), self._take(8 * self.flat.most_dims)
        self._heap = self._take(8 * (len(self.step.slots) + len(self.step.literals)))
        self._weights, self._arena = self._take(self.flat.weights_bytes), self._take(self.flat.arena_bytes)
        most = self._shapes(self.model["max_tokens"], self.model["max_context"])
        self._inputs = [self._take(prod(most[x.name]) * DTYPES[x.dtype].itemsize) for x in self.step.inputs]
        self._instantiate(folder / level["module"], stack)
        for shard in level["shards"]:
            content = np.fromfile(folder / shard["file"], np.uint8)
            self._view(self._weights + shard["begin"], np.uint8, content.size)[:] = content
        self._words()[len(self.step.slots) :] = list(map(int, self.step.literals))

    def append(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens to the sequence. Return the logits of the last token."""
        shapes, begin = self._shapes(len(tokens), self.length + len(tokens)), self.length
        self.length += len(tokens)
        positions = np.arange(begin, self.length)
        values = {
            "tokens": tokens,
            "positions": positions,
            "slots": PAGE_SIZE + positions,
            "seq_ids": np.zeros(len(tokens)),
            "page_tables": 1 + np.arange(-(-self.length // PAGE_SIZE)),
            "logit_rows": [len(tokens) - 1],
        }
        for tensor, at in zip(self.step.inputs, self._inputs, strict=True):
            if tensor.name in values:
                self._view(at, np.int32, prod(shapes[tensor.name]))[:] = values[tensor.name]
        self._call([shapes[x.name] for x in self.step.inputs])
        heap, logits = self._words(), self.step.outputs[0]
        place = self._arena + self.step.arena_begin + int(heap[logits.offset])
        return self._view(place, np.float32, prod(int(heap[slot]) for slot in logits.shape)).copy()

    def _call(self, shapes: list[tuple[int, ...]]) -> None:
        step, store = self.step, self._store
        heap = self._words()
        for d in step.definitions:
            heap[d.slot] = shapes[d.input][d.axis]
        assert step.derive is None or self._exports[step.derive](store, self._heap) == 0
        bases = {FlatBase.ARENA: self._arena + step.arena_begin, FlatBase.WEIGHTS: self._weights}
        bases |= {FlatBase.INPUT + i: at for i, at in enumerate(self._inputs)}
        buffers, dims = self._view(self._buffers, np.uint32, self.flat.most_buffers), self._view(self._dims, np.int64, self.flat.most_dims)
        for record in step.records:
            buffers[: len(record.buffers)] = [bases[base] + int(heap[slot]) for base, slot in record.buffers]
            dims[: len(record.dims)] = [heap[slot] for slot in record.dims]
            iterations = self._exports[record.grid](store, self._dims)
            if iterations > 0:
                self._exports[record.body](store, self._buffers, self._dims, 0, iterations)

    def _shapes(self, tokens: int, length: int) -> dict[str, tuple[int, ...]]:
        rows = dict.fromkeys(("tokens", "positions", "slots", "seq_ids"), (tokens,))
        caches = {name: tuple(shape) for name, shape in self.model["cache_shapes"].items()}
        return {**rows, **caches, "page_tables": (1, -(-length // PAGE_SIZE)), "logit_rows": (1,), "hidden_rows": (0,)}

    def _take(self, num_bytes: int) -> int:
        begin, self._end = self._end, align(self._end + num_bytes)
        return begin

    def _instantiate(self, module: Path, stack: int) -> None:
        store = self._store = wasmtime.Store()
        loaded = wasmtime.Module(store.engine, module.read_bytes())
        self._memory = wasmtime.Memory(store, wasmtime.MemoryType(wasmtime.Limits(-(-self._end // PAGE_BYTES), PAGE_BYTES)))
        pointer = wasmtime.Global(store, wasmtime.GlobalType(wasmtime.ValType.i32(), True), wasmtime.Val.i32(stack))
        given = {"memory": self._memory, "__stack_pointer": pointer}
        self._exports: Any = wasmtime.Instance(store, loaded, [given[str(x.name)] for x in loaded.imports]).exports(store)
        assert self._exports["__heap_base"].value(store) <= BEGIN

    def _words(self) -> NDArray[np.int64]:
        """Return a view of the shape heap, which consists of the slots and then the literals."""
        return self._view(self._heap, np.int64, len(self.step.slots) + len(self.step.literals))

    def _view(self, at: int, dtype: type[np.generic], count: int) -> NDArray[Any]:
        base = ctypes.addressof(self._memory.data_ptr(self._store).contents)
        return np.ctypeslib.as_array((ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(base + at)).view(dtype)
