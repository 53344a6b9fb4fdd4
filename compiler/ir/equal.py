"""Compare programs for structural equality up to the names of variables, and find the first difference.

The comparison pairs variables as it meets them: a variable on the left belongs to exactly one on the right, with an equal declaration.
Functions are matched by name. The comparison ignores differences without effect: how sequences of statements are nested; whether adjacent
plain blocks are merged, and empty ones left out; whether an operator's attribute is written if it equals its default; whether a `Copy` or
the copied atom is used; whether equal scalars are one shared node; whether a constant of type f32 is written 1 or 1.0; whether an attribute
is a list or a tuple; the variable of a launch; and the `boundary` of a `MatchCast`, which appears only in messages. Dimensions are equal if
they are proved equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, items
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function
from compiler.ir.graph.values import Call, Copy, Launch, MatchCast
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Const, Scalar, ScalarParam
from compiler.ir.loops.statements import Seq
from compiler.ir.loops.visit import statements
from compiler.ir.module import IRModule
from compiler.ir.op import OpDef
from compiler.ir.prove import prove_eq
from compiler.ir.text.printer import canonical_text, print_node
from compiler.ir.text.printer_types import canonical_number
from compiler.ir.types import FuncType, dims_of

Node = IRModule | Function | PrimFunc


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two programs differ, and the text of both sides at that place."""

    path: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.path}\n  left:  {self.left}\n  right: {self.right}"


def structural_equal(a: Node, b: Node) -> Difference | None:
    """Return None if the nodes are equal, else the first difference."""
    try:
        if isinstance(a, IRModule) and isinstance(b, IRModule):
            for name in dict.fromkeys([*a.functions, *b.functions]):
                _Pairing().compare(name, a.functions.get(name), b.functions.get(name))
        else:
            _Pairing().compare("", a, b)
    except _Found as found:
        path = "".join(reversed(found.places)).removeprefix(".")
        return Difference(path or "program", found.left, found.right)
    return None


def assert_equal(a: Node, b: Node) -> None:
    """Raise AssertionError with the first difference, unless the nodes are equal."""
    difference = structural_equal(a, b)
    assert difference is None, f"the programs differ at {difference}"


def structural_hash(module: IRModule, *, ranges: bool = True) -> str:
    """Return a hash that ignores the names of variables and the order of functions. Without `ranges`, it also ignores the declared ranges
    of the symbolic variables of graph functions, but not the ranges in function types."""
    texts = (canonical_text(name, module.functions[name], ranges=ranges) for name in sorted(module.functions))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class _Found(Exception):
    """Raised at the first difference. While the exception propagates, each enclosing comparison adds its place."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(left, right)
        self.places: list[str] = []  # path to the difference, the innermost part first
        self.left, self.right = left, right


class _Pairing:
    """Compares two nodes and keeps the pairs of variables found so far: each variable of the left has one partner on the right."""

    def __init__(self) -> None:
        self._partner: dict[_Variable, _Variable] = {}
        self._taken: set[_Variable] = set()  # variables on the right that have a partner
        self._images: dict[Dim, Dim] = {}  # maps expressions of the left side to the same expressions over variables of the right side
        # `_same` has the pairs of scalars compared under the present pairing of variables, so that shared nodes are compared once.
        self._same: set[tuple[Scalar, Scalar]] = set()

    def compare(self, place: str, a: Any, b: Any) -> None:
        """Raise `_Found` if the nodes differ. `place` is their place in the node that contains them."""
        try:
            self._compare(_plain(a), _plain(b))
        except _Found as found:
            found.places.append(place)
            raise

    def _compare(self, a: Any, b: Any) -> None:
        """Raise `_Found` if the nodes differ, by the rules at the head of this file. `_plain` has already been applied to both nodes."""
        if type(a) is not type(b):
            raise _differ(a, b)
        if isinstance(a, Scalar):
            if (a, b) in self._same:
                return
            self._same.add((a, b))
        match a:
            case Dim():
                self._dims(a, b)
            case Var() | Buffer() | ScalarParam() | DimVar():
                self._variables(a, b)
            case Block():
                self.compare(".kind", a.kind, b.kind)
                for x, y in zip_longest(a.bindings, b.bindings, fillvalue=_ABSENT):
                    named = x if isinstance(x, Binding) else y
                    assert isinstance(named, Binding)
                    self.compare(f".{named.var.name}", x, y)
            case Binding():
                self.compare("", a.value, b.value)
                if not isinstance(a.value, Launch):  # a launch has no value
                    self.compare("", a.var, b.var)
            case Function():
                self._pair_bare([d for p in a.params for d in dims_of(p.type)], [d for p in b.params for d in dims_of(p.type)])
                for name in ("params", "weights", "pure", "result_type", "arena"):
                    self.compare(f".{name}", getattr(a, name), getattr(b, name))
                self.compare("", a.body, b.body)
            case PrimFunc():
                self._pair_bare(_defining(a), _defining(b))
                self._fields(a, b)
            case MatchCast():
                self.compare(".value", a.value, b.value)
                self.compare(".type", a.type, b.type)  # `boundary` appears only in messages
            case FuncType():
                _Pairing()._fields(a, b)  # a signature has its own variables, so it gets its own pairing
            case Body():
                with self._scope():
                    for x, y in zip_longest(_blocks(a), _blocks(b), fillvalue=Block(())):
                        self.compare("", x, y)
                    self.compare(".result", a.result, b.result)
            case tuple():
                self._sequences(a, b)
            case Mapping():
                for key in dict.fromkeys([*a, *b]):
                    self.compare(f".{key}", a.get(key, _ABSENT), b.get(key, _ABSENT))
            case Constant(data=data):
                if data.dtype != b.data.dtype or data.shape != b.data.shape or data.tobytes() != b.data.tobytes():
                    raise _differ(a, b)
            case OpDef():
                if a is not b:
                    raise _Found(a.name, b.name)
            case _ if is_dataclass(a):
                if defined := _defined(a):
                    with self._scope():
                        self._release(defined, _defined(b))
                        self._fields(a, b)
                else:
                    self._fields(a, b)
            case _:
                if repr(a) != repr(b):  # repr distinguishes -0.0 from 0.0, and a NaN has the same repr as itself
                    raise _differ(a, b)

    def _fields(self, a: Any, b: Any) -> None:
        for field in fields(a):
            self.compare(f".{field.name}", getattr(a, field.name), getattr(b, field.name))

    def _sequences(self, a: Sequence[Any], b: Sequence[Any]) -> None:
        for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
            self.compare(f"[{i}]", x, y)

    # --- variables -----------------------------------------------------------------------------------------------------

    def _variables(self, a: _Variable, b: _Variable) -> None:
        """Require that the variables are partners. Pair them if neither has a partner and their declarations agree."""
        partner = self._partner.get(a)
        if partner is b:
            return
        if partner is not None:
            raise _Found(a.name, f"{b.name}, but {a.name} is already paired with {partner.name}")
        if b in self._taken:
            raise _Found(a.name, f"{b.name}, which is already paired with another variable of the left program")
        self._partner[a] = b
        self._taken.add(b)
        prefix = f".{a.name}" if isinstance(a, DimVar) else ""
        for name in _DECLARED[type(a)]:
            self.compare(f"{prefix}.{name}", getattr(a, name), getattr(b, name))

    def _release(self, a: set[_Variable], b: set[_Variable]) -> None:
        """Forget the partners of variables that a binder defines again."""
        self._partner = {x: y for x, y in self._partner.items() if x not in a and y not in b}
        self._taken = set(self._partner.values())
        self._images, self._same = {}, set()

    @contextmanager
    def _scope(self) -> Generator[None]:
        """When the `with` ends, forget the pairs of variables that were found inside it."""
        outer = dict(self._partner), set(self._taken), self._same
        yield
        self._partner, self._taken, self._same = outer
        self._images = {}

    # --- dimensions ----------------------------------------------------------------------------------------------------

    def _pair_bare(self, a: Sequence[Dim], b: Sequence[Dim]) -> None:
        """Pair dimensions that are single variables first, so that expressions over these variables can be compared: a parameter may
        mention a variable that a later parameter defines."""
        for x, y in zip(a, b, strict=False):
            if x.var is not None and y.var is not None and x.var not in self._partner and y.var not in self._taken:
                self._variables(x.var, y.var)

    def _dims(self, a: Dim, b: Dim) -> None:
        """Require that the expressions are proved equal when each variable on the left is replaced by its partner. Variables without a
        partner are paired in order."""
        image = self._images.get(a)
        if image is None:
            mine = [v for v in a.vars() if v not in self._partner]
            theirs = [v for v in b.vars() if v not in self._taken]
            if len(mine) != len(theirs):
                raise _differ(a, b)
            for x, y in zip(mine, theirs, strict=True):
                self._variables(x, y)
            partners = {v: self._partner[v] for v in a.vars()}
            image = self._images[a] = a.substitute({v: p for v, p in partners.items() if isinstance(p, DimVar)})
        if image != b and not prove_eq(image, b):
            raise _differ(a, b)


_Variable = Var | Buffer | ScalarParam | DimVar
_ABSENT = "absent"
_DECLARED: dict[type, tuple[str, ...]] = {
    Var: ("type",),
    Buffer: ("shape", "dtype", "scope"),
    ScalarParam: ("dtype",),
    DimVar: ("lower", "upper", "multiple_of"),
}


def _defined(node: Any) -> set[_Variable]:
    """Return the variables and buffers that the node itself defines."""
    return {*items(node, Holds.NEW_VAR), *items(node, Holds.NEW_BUFFER), *(var for var, _ in items(node, Holds.NEW_AXES))}


def _defining(prim: PrimFunc) -> list[Dim]:
    """Return the dimensions of the parameters, in order: the extents of buffers, and integer variables."""
    return [d for p in prim.params if not isinstance(p, ScalarParam) for d in (p.shape if isinstance(p, Buffer) else (Dim.of(p),))]


def _plain(node: Any) -> Any:
    """Return the node in a form in which differences without effect disappear. For example, attributes at their defaults are filled in."""
    match node:
        case Copy(value=value):
            return value
        case Seq():
            stmts = statements(node)
            return stmts[0] if len(stmts) == 1 else stmts
        case list():
            return tuple(node)
        case Const(value=value, dtype=dtype):
            return Const(canonical_number(value, dtype), dtype)
        case ScalarValue(value=value, dtype=dtype):
            dtype = DType(dtype)
            if not isinstance(value, Dim):
                value = canonical_number(value, dtype)
            return ScalarValue(Dim.of(value) if dtype is DType.I64 and isinstance(value, int) else value, dtype)
        case Call(op=op, args=args, attrs=attrs):
            return Call(op, args, {**op.attributes, **attrs})
        case _:
            return node


def _blocks(body: Body) -> list[Block]:
    """Merge adjacent plain blocks, and drop plain blocks without bindings."""
    blocks: list[Block] = []
    for block in body.blocks:
        plain = block.kind is BlockKind.PLAIN
        if plain and blocks and blocks[-1].kind is BlockKind.PLAIN:
            blocks[-1] = Block(blocks[-1].bindings + block.bindings)
        elif block.bindings or not plain:
            blocks.append(block)
    return blocks


def _differ(a: object, b: object) -> _Found:
    left, right = print_node(a), print_node(b)
    return _Found(left, right if left != right else f"{right}, of other variables")
