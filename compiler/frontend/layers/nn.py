"""Layers that emit IR: they build a function, and name its weights as the checkpoint does.

Weights are parameters with the types and shapes that they have in the file. The program itself contains the conversions that a step needs
(stacking, transposing, quantising); the compiler moves them to load time. So there is no separate table of conversions.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compiler.frontend.errors import ConfigError
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import ORDER, UNIT, Form, Offset
from compiler.ir.blocks import NUMBERS
from compiler.ir.dims import Dim, DimLike
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import TupleGet
from compiler.ir.numbers import SPLIT, SPLIT_STEP, Kind
from compiler.ir.op import OpDef
from compiler.ir.types import TensorType, tensor
from compiler.ops.elementwise import ADD, CAST, MULTIPLY
from compiler.ops.embedding import EMBEDDING
from compiler.ops.index import GATHER, SCATTER, TAKE
from compiler.ops.manipulate import BROADCAST_TO, CONCAT, RESHAPE, SLICE
from compiler.ops.normalize import LAYER_NORM, RMS_NORM
from compiler.ops.products.blocks import UNPACK_BLOCKS
from compiler.ops.products.experts import EXPERT_LINEAR
from compiler.ops.products.look_up import LOOK_UP, NO_OFFSET, SHIFT, ZERO
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.quantize import DEQUANTIZE, QUANTIZE
from compiler.ops.ranks import ALL_GATHER, RANK_EMBEDDING
from compiler.ops.reduce import SUM

F32 = DType.F32
GROUPS = (32, 64, 128)  # supported numbers of inputs that share a scale
BUDGETS = {"4bit": 4.75, "5bit": 5.5, "6bit": 6.5}  # bits per weight, with the scales
LEAST_BUDGET, MOST_BUDGET = 4.4, 6.5
OFFSETS = {Offset.NONE: NO_OFFSET, Offset.ZERO: ZERO, Offset.SHIFT: SHIFT}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of matrix products are stored in memory: as floats (`bits` is 16 or 32), or as integers of 8 or 4 bits with a scale
    per `group` of inputs (0: one scale per row). Floats of 16 bits in files keep their type, f16 or bf16, even if `bits` is 32. If `bits`
    is 16, f32 becomes bf16."""

    bits: int
    group: int = 0
    fast: bool = False  # inputs of products with integers may be rounded to 8 bits, too
    as_stored: bool = False  # the numbers of a quantised checkpoint are not converted
    budget: float = 0.0  # if not 0, `deploy/quantizing` first quantises the matrices to this number of bits per weight on average

    @property
    def scale_dtype(self) -> str:
        """The type of scales. With numbers of 4 bits, scales take a large part of the memory, so they are rounded to bf16. This costs no
        accuracy, since numbers are quantised with the rounded scale."""
        return "bf16" if self.bits == 4 else "f32"

    @property
    def coarse_rows(self) -> bool:
        """Whether weights become integers of 8 bits, and inputs of their products may be rounded to 8 bits, too."""
        return self.fast and not self.as_stored and self.bits == 8

    @staticmethod
    def parse(text: str) -> WeightFormat:
        """Parse the name of a format, such as `auto`, `auto-fast`, `f32`, `bf16`, `int8`, `int8-fast`, `int8-128`, `4bit` or `int4-32`, or
        a number of bits per weight such as `4.6`. Raise ConfigError for other texts."""
        if text == "auto":
            return AS_STORED
        if text == "auto-fast":
            return replace(AS_STORED, fast=True)
        if (budget := _budget_of(text)) is not None:
            return WeightFormat(16, as_stored=True, budget=budget)
        if text == "int8-fast":
            return WeightFormat(8, fast=True)
        kind, _, group = text.partition("-")
        bits = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4}.get(kind)
        if text == "int4":
            raise ConfigError(
                f"quantize is {text!r}, which rounds without measuring what it costs; choose 4bit, or int4-32 for plain rounding"
            )
        if bits is None or (group and (bits > 8 or group not in map(str, GROUPS))):
            raise ConfigError(
                f"quantize is {text!r}; expected auto, auto-fast, f32, bf16, int8, int8-fast, {', '.join(BUDGETS)}, a number of bits per "
                f"weight from {LEAST_BUDGET} to {MOST_BUDGET}, or int8-GROUP, int4-GROUP with a group of {', '.join(map(str, GROUPS))}"
            )
        return WeightFormat(bits, int(group) if group else 0)


def _budget_of(text: str) -> float | None:
    """Return the bits per weight that the name or number `text` stands for. Return None for names of other formats. Raise ConfigError for a
    number out of range."""
    try:
        budget = BUDGETS.get(text) or float(text)
    except ValueError:
        return None
    if not LEAST_BUDGET <= budget <= MOST_BUDGET:  # raises for NaN, too
        raise ConfigError(f"quantize is {text!r}; expected at least {LEAST_BUDGET} and at most {MOST_BUDGET} bits per weight")
    return budget


DEFAULT_FORMAT = WeightFormat(16)
AS_STORED = WeightFormat(16, as_stored=True)


@dataclass(slots=True)
class Net:
    """A builder of functions and of the weights that they use. `dtypes` has the element type of every tensor in the checkpoint; `weights`
    collects the tensors that the current function uses. A head of floats is quantised to no fewer than 8 bits, since its errors directly
    affect the logits. `forms` describes the matrices that the checkpoint stores as quantised numbers."""

    dtypes: Mapping[str, DType]
    format: WeightFormat = DEFAULT_FORMAT
    builder: Builder = field(default_factory=Builder)
    weights: dict[str, Var] = field(default_factory=dict[str, Var])
    forms: Mapping[str, Form] = field(default_factory=dict[str, Form])
    numerics: Numerics = Numerics.AUTO
    ranks: int = 1  # number of ranks that run the program, each with a part of the weights: see `compiler/frontend/ranks.py`
    # If not None, `squares` collects, for each input of products, the sum over all rows of the squares in each column.
    # A key has the names of the matrices that read the input. Matrices for which a layer chooses the format itself are left out.
    squares: dict[tuple[str, ...], Var] | None = None
    _decoded: dict[Var, Kind] = field(default_factory=dict[Var, Kind])  # results of `held` -> the kind of their numbers
    _unpacked: dict[tuple[str, ...], dict[str, Var]] = field(default_factory=dict[tuple[str, ...], dict[str, Var]])  # see `_parts`
    _orders: dict[Var, Var] = field(default_factory=dict[Var, Var])  # results of `held` with sorted columns -> input of each column
    # Results of `held` that have only the larger part of each number -> the matrix of the smaller parts. Both decode the same codes.
    _rests: dict[Var, Var] = field(default_factory=dict[Var, Var])

    @contextmanager
    def function(self, name: str, inputs: Sequence[Var], *, pure: bool = True) -> Generator[None]:
        """Build a function within the context. Its parameters are the inputs, and then the weights that it uses."""
        params = list(inputs)
        self.weights, self._unpacked = {}, {}
        with self.builder.function(name, params, num_inputs=len(inputs), pure=pure):
            with self.builder.dataflow():
                yield
            params.extend(self.weights.values())

    @property
    def rounds(self) -> bool:
        """Whether machines may round operands of products to bf16."""
        integers = any(form.kind is not Kind.E4M3 for form in self.forms.values())
        return self.numerics.rounds(is_quantised=integers or self.format.bits <= 8)

    def tolerates(self, format: WeightFormat, w: Var) -> str | None:
        """Return the type, `i8` or `bf16`, to which machines may round the inputs of a product by `w`. Return None if machines may not
        round the inputs."""
        if format.fast and (self._is_decoded(w) or not format.as_stored):
            return "i8"
        return "bf16" if self.rounds and format.bits <= 16 else None

    # --- weights -------------------------------------------------------------------------------------------------------

    def weight(self, name: str, *shape: int) -> Var:
        """Return the tensor of the checkpoint that has this full name, dequantised if the checkpoint stores it as encoded numbers. A tensor
        that the checkpoint lacks counts as f32; `Accounting` reports it."""
        if name in self.forms:
            return self._whole(self.held([name], [shape]), shape)
        if name not in self.weights:
            self.weights[name] = Var(name, tensor(shape, self.dtypes.get(name, F32)))
        return self.weights[name]

    def held(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Var:
        """Return matrices that the checkpoint stores as numbers with the same `Form`, stacked by rows and dequantised. If the form sorts
        columns by group, the columns stay sorted, and products reorder their inputs (`_orders`). If the form's kind stores each number as
        the sum of two integers (`SPLIT`), the result has only the larger ones; `_rests` has the matrix of the smaller ones, which users of
        the result add."""
        form, of = self.forms[names[0]], self._parts(names, shapes)
        parts = [of[part] for part in form.numbers]
        if form.per_unit:
            levels = [(of[part], of[unit]) for part, unit in zip(form.numbers[1:], form.units, strict=True)]
            parts[1:] = [self.call(DEQUANTIZE, *both, bits=8, group=form.per_unit) for both in levels]
        group = 0 if form.group == shapes[0][-1] else form.group
        shifted = form.offset is Offset.SHIFT
        found = self.call(DEQUANTIZE, *parts, bits=form.bits, group=group, shifted=shifted, kind=str(form.kind))
        self._decoded[found] = form.kind
        if form.ordered:
            self._orders[found] = of[ORDER]
        if (split := SPLIT.get(form.kind)) is not None:
            numbers, scale = parts
            smaller = self.scale(scale, 1 / SPLIT_STEP)
            self._rests[found] = self.call(DEQUANTIZE, numbers, smaller, bits=form.bits, group=group, kind=str(split.rest))
        return found

    def _parts(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, Var]:
        """Return the parts of matrices with the same `Form` by name, stacked by rows. Unpack blocks into parts."""
        form = self.forms[names[0]]
        infos = [form.infos(shape) for shape in shapes]

        def stacked(part: str) -> Var:
            return self.stacked([self.weight(f"{name}.{part}", *info[part].shape) for name, info in zip(names, infos, strict=True)])

        if not form.blocks:
            return {part: stacked(part) for part in form.parts}
        if tuple(names) not in self._unpacked:
            blocks = stacked(form.blocks)
            stored = {form.numbers[0]: NUMBERS} | {part: part for part in (*form.numbers[1:], *form.units)}
            self._unpacked[tuple(names)] = {
                own: self.call(UNPACK_BLOCKS, blocks, format=form.blocks, part=part, name=f"{names[0]}.{own}")
                for own, part in stored.items()
            }
        return self._unpacked[tuple(names)]

    def _whole(self, w: Var, shape: tuple[int, ...]) -> Var:
        """Return a matrix from `held` in the usual form: columns are in the order of the inputs, and both parts of split numbers are
        added."""
        if w in self._rests:
            return self.add(w, self._rests[w])
        if (order := self._orders.get(w)) is None:
            return w
        places = self.call(BROADCAST_TO, order, ShapeValue(tuple(map(Dim.of, shape))))
        return self.call(SCATTER, w, places, w, axis=1)

    def vector(self, name: str, size: int) -> Var:
        """Return a one-dimensional weight as f32."""
        return self.as_f32(self.weight(name, size))

    # --- values --------------------------------------------------------------------------------------------------------

    def call(self, op: OpDef, *args: Atom, **attrs: Any) -> Var:
        return self.builder.call(op, *args, **attrs)

    def as_f32(self, x: Var) -> Var:
        return x if isinstance(x.type, TensorType) and x.type.dtype is F32 else self.call(CAST, x, dtype="f32")

    def field(self, value: Atom, index: int) -> Var:
        return self.builder.emit(TupleGet(value, index))

    def reshape(self, x: Atom, *dims: DimLike) -> Var:
        return self.call(RESHAPE, x, ShapeValue(tuple(Dim.of(d) for d in dims)))

    def slice(self, x: Atom, axis: int, begin: int, end: DimLike, *, stride: int = 1) -> Var:
        end = Dim.of(end)
        step = {} if stride == 1 else {"stride": stride}
        return self.call(SLICE, x, axis=axis, begin=begin, end=end.const if end.is_const else end, **step)

    def scale(self, x: Atom, factor: float) -> Var:
        return self.call(MULTIPLY, x, ScalarValue(factor, "f32"))

    def add(self, a: Atom, b: Atom) -> Var:
        return self.call(ADD, a, b)

    # --- layers --------------------------------------------------------------------------------------------------------

    def embedding(self, name: str, ids: Atom, vocab: int, size: int) -> Var:
        """Return the rows of a table that belong to these ids, as f32: [ids, size]. If the program runs on several ranks, each rank stores
        a part of the table, and reads the parts of all ranks."""
        table, shape = f"{name}.weight", (vocab // self.ranks, size)
        if self.ranks > 1:
            tables = [self.weight(table, *shape)] * self.ranks
            return self.as_f32(self.call(RANK_EMBEDDING, ids, *tables, size=vocab))
        if (form := self.forms.get(table)) is None or form.ordered or form.kind in SPLIT:
            return self.as_f32(self.call(EMBEDDING, self.weight(table, *shape), ids))
        of, (numbers, *levels) = self._parts([table], [shape]), form.numbers
        parts = [numbers, *(part for level in levels for part in (level, *([f"{level}{UNIT}"] if form.per_unit else [])))]
        operands = [of[part] for part in parts]
        attrs = {"bits": form.bits, "kind": str(form.kind), "in_units": bool(form.per_unit), "offset": OFFSETS[form.offset]}
        return self.call(LOOK_UP, ids, *operands, size=vocab, length=size, **attrs)

    def linear(
        self,
        x: Atom,
        names: str | Sequence[str],
        in_size: int,
        sizes: int | Sequence[int],
        *,
        bias: bool = False,
        format: WeightFormat | None = None,
    ) -> Var:
        """Apply one or several linear layers to the same input, and concatenate their outputs. Layer `names[i]` has `sizes[i]` outputs. One
        product computes all layers, if the checkpoint stores all matrices with the same `Form` or all without a form, and if their columns
        are not sorted by group."""
        names = (names,) if isinstance(names, str) else names
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        if format is None:
            self._observe(x, names)
        pairs = list(zip(names, sizes, strict=True))
        forms = {self.forms.get(f"{n}.weight") for n in names}
        are_sorted = any(form is not None and form.ordered for form in forms)
        if len(forms) > 1 or (are_sorted and len(names) > 1):  # matrices of different forms or orders are multiplied separately
            products = [self.linear(x, n, in_size, s, bias=bias, format=format) for n, s in pairs]
            return self.call(CONCAT, *products, axis=1)
        if forms != {None}:
            w = self.held([f"{n}.weight" for n in names], [(s, in_size) for s in sizes])
        else:
            matrices = [self.weight(f"{n}.weight", s, in_size) for n, s in pairs]
            types = {matrix.type.dtype for matrix in matrices if isinstance(matrix.type, TensorType)}
            w = self.stacked(matrices if len(types) == 1 else [self.as_f32(matrix) for matrix in matrices])
        return self.product(x, w, self.stacked([self.vector(f"{n}.bias", s) for n, s in pairs]) if bias else None, format=format)

    def gathered(self, x: Var) -> Var:
        """Return `x` with the columns of all ranks side by side, [rows, ranks * columns]."""
        return x if self.ranks == 1 else self.call(ALL_GATHER, *[x] * self.ranks, axis=1)

    def output_linear(self, x: Var, name: str, in_size: int, size: int, *, bias: bool = False) -> Var:
        """Apply a linear layer that reads the columns of all ranks, and return all columns of the result. Each rank has `in_size` columns
        of `x`."""
        return self.gathered(self.linear(self.gathered(x), name, in_size * self.ranks, size // self.ranks, bias=bias))

    def product(self, x: Atom, w: Var, bias: Var | None = None, *, format: WeightFormat | None = None) -> Var:
        """Multiply by a matrix [outputs, inputs] that is computed from weights. A matrix that is dequantised from the checkpoint is not
        rounded again."""
        format = format or self.format
        if self._is_decoded(w):
            x = self.call(TAKE, x, self._orders[w], axis=1) if w in self._orders else x
            found = self.call(LINEAR, x, w, *([] if bias is None else [bias]), tolerates=self.tolerates(format, w))
            if w not in self._rests:
                return found
            return self.add(found, self.call(LINEAR, x, self._rests[w], tolerates=self.tolerates(format, w)))
        operands = (x, self._held(w, format), *([] if bias is None else [bias]))
        return self.call(LINEAR, *operands, tolerates=self.tolerates(format, w))

    def expert_linear(self, x: Atom, name: str, experts: Atom, count: int, in_size: int, size: int, *, bias: bool = False) -> Var:
        """Multiply each row by the matrix of its expert. `name` is the name of the tensor that joins the matrices of all experts."""
        self._observe(x, (name,))
        own, shape = f"{name}.weight", (count, size, in_size)
        w = self.held([own], [shape]) if own in self.forms else self.weight(own, *shape)
        if w in self._orders:
            x = self.call(GATHER, x, self.call(TAKE, self._orders[w], experts, axis=0), axis=1)
        return self.chosen_product(x, w, experts, self.as_f32(self.weight(f"{name}.bias", count, size)) if bias else None)

    def chosen_product(self, x: Atom, w: Var, choice: Atom, bias: Var | None = None) -> Var:
        """Multiply each row by a matrix of `w[matrices, outputs, inputs]`, whose index for each row is in `choice`."""
        decoded = self._is_decoded(w)
        operands = (x, w if decoded else self._held(w, self.format), choice, *([] if bias is None else [bias]))
        found = self.call(EXPERT_LINEAR, *operands, tolerates=self.tolerates(self.format, w))
        if w not in self._rests:
            return found
        return self.add(found, self.call(EXPERT_LINEAR, x, self._rests[w], choice, tolerates=self.tolerates(self.format, w)))

    def rms_norm(self, x: Atom, name: str, size: int, eps: float, *, offset: float = 0.0) -> Var:
        """Apply an RMS norm. `offset` is added to its weights."""
        return self.call(RMS_NORM, x, self.vector(f"{name}.weight", size), eps=eps, weight_offset=offset)

    def unit_norm(self, x: Atom, size: int, eps: float) -> Var:
        """Apply an RMS norm without weights."""
        return self.call(RMS_NORM, x, Constant(np.ones(size, np.float32)), eps=eps)

    def layer_norm(self, x: Atom, name: str, size: int, eps: float, *, offset: float = 0.0, bias: bool = True) -> Var:
        """Apply a layer norm. `offset` is added to its weights, and `bias` says whether the checkpoint has a bias of the norm."""
        weight = self.vector(f"{name}.weight", size)
        if offset:
            weight = self.call(ADD, weight, ScalarValue(offset, "f32"))
        shift = self.vector(f"{name}.bias", size) if bias else Constant(np.zeros(size, np.float32))
        return self.call(LAYER_NORM, x, weight, shift, eps=eps)

    def layer_norm_by_head(self, x: Atom, name: str, heads: int, size: int, eps: float) -> Var:
        """Apply a layer norm without bias to each head of `x[tokens, heads, size]`. Each head has its own weights."""
        ones, zeros = (Constant(np.full(size, value, np.float32)) for value in (1, 0))
        weight = self.as_f32(self.weight(f"{name}.weight", heads, size))
        return self.call(MULTIPLY, self.call(LAYER_NORM, x, ones, zeros, eps=eps), weight)

    def head(self, x: Atom, name: str, in_size: int, vocab: int, *, bias: bool = False) -> Var:
        """Return the logits, [rows, vocab], of which each rank computes a part. If the format of other matrices has fewer than 8 bits, or
        lets inputs be rounded to 8 bits, the head has another format: its inputs are not rounded to 8 bits, and its weights, if they are
        floats, become integers of 8 bits, or keep 16 bits if the format of other matrices is `as_stored`."""
        format = None
        if self.format.bits < 8 or self.format.fast:
            format = AS_STORED if self.format.as_stored else WeightFormat(8)
        return self.gathered(self.linear(x, name, in_size, vocab // self.ranks, bias=bias, format=format))

    def _observe(self, x: Atom, names: Sequence[str]) -> None:
        """Add the sums of squares of `x`, an input of these matrices, to `squares` if they are collected."""
        if self.squares is not None:
            wide = self.as_f32(x) if isinstance(x, Var) else x
            self.squares[tuple(f"{name}.weight" for name in names)] = self.call(SUM, self.call(MULTIPLY, wide, wide), axes=0)

    def _is_decoded(self, w: Var) -> bool:
        """Return whether `held` returned this matrix: the checkpoint stores it as encoded numbers."""
        return w in self._decoded

    def _held(self, w: Var, format: WeightFormat) -> Var:
        """Convert the weight to this format, and return the decoded values. Lowering fuses the decoding into the product, so only the
        converted weight is stored in memory. Raise ConfigError if the format's groups do not divide the inputs."""
        assert isinstance(w.type, TensorType) and w.type.dtype is not None and w.type.shape is not None
        if format.bits == 32 or (format.bits == 16 and w.type.dtype is not F32):
            return w
        if format.bits == 16:
            return self.call(CAST, w, dtype="bf16")
        in_size = w.type.shape[-1].const
        if format.group and in_size % format.group:
            fitting = ["int8", *(f"int{format.bits}-{group}" for group in GROUPS if in_size % group == 0)]
            raise ConfigError(
                f"{w.name} has {in_size} inputs, not a multiple of the group size {format.group}; choose {' or '.join(fitting)}"
            )
        both = self.call(QUANTIZE, self.as_f32(w), bits=format.bits, group=format.group, dtype=format.scale_dtype)
        return self.call(DEQUANTIZE, self.field(both, 0), self.field(both, 1), bits=format.bits, group=format.group)

    def stacked(self, parts: list[Var]) -> Var:
        """Concatenate tensors along their first axis."""
        return parts[0] if len(parts) == 1 else self.call(CONCAT, *parts, axis=0)


def prefix_of(tensors: Mapping[str, object], prefix: str) -> str:
    """Return the prefix if names in the checkpoint have it, else "". Models saved without a head lack the prefix."""
    return prefix if any(name.startswith(prefix) for name in tensors) else ""
